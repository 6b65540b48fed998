"""Generate chats that offer tools, most of which call one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from dialogs import copy_name, identity, small_talk
from vocabulary import Chat, city, invented, name, number, persona, split, word


def tool(name_: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name_, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """A request, the call it asks for, the tool's answer, and what to say then."""

    tool: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


def use_calculator(rng: Random) -> ToolUse:
    tool_name = rng.choice(("calculator", "calculate", "calc"))
    x, y = int(number(rng, (1, 2, 2, 3))), int(number(rng, (1, 2, 2, 3)))
    sign = rng.choice("+-*")
    result = str({"+": x + y, "-": x - y, "*": x * y}[sign])
    expression = f"{x} {sign} {y}"
    return ToolUse(
        tool(tool_name, "Evaluates an expression.", expression="string"),
        rng.choice(("What is {e}?", "Calculate {e}.", "Compute {e}.")).format(e=expression),
        {"expression": expression},
        result,
        rng.choice(("{e} = {r}", "The answer is {r}.", "It is {r}.")).format(
            e=expression, r=result
        ),
    )


def use_add(rng: Random) -> ToolUse:
    tool_name, sign = rng.choice((("add", "+"), ("multiply", "*"), ("subtract", "-")))
    x, y = int(number(rng, (1, 2, 2, 3))), int(number(rng, (1, 2, 2, 3)))
    result = str({"+": x + y, "-": x - y, "*": x * y}[sign])
    return ToolUse(
        tool(tool_name, f"Does a {sign} b.", a="integer", b="integer"),
        f"What is {x} {sign} {y}?",
        {"a": x, "b": y},
        result,
        f"The answer is {result}.",
    )


def use_weather(rng: Random) -> ToolUse:
    tool_name = rng.choice(("weather", "get_weather", "get_current_weather"))
    place, sky = city(rng), rng.choice(split("sunny cloudy rainy windy snowy foggy warm cold"))
    key = rng.choice(("city", "location"))
    return ToolUse(
        tool(tool_name, "Gets the weather.", **{key: "string"}),
        rng.choice(("What is the weather in {c}?", "How is the weather in {c}?")).format(c=place),
        {key: place},
        sky,
        f"The weather in {place} is {sky}.",
    )


def use_lookup(rng: Random) -> ToolUse:
    tool_name = rng.choice(("lookup", "search", "find", "web_search"))
    key = rng.choice(("query", "key", "q"))
    thing, found = word(rng), rng.choice((word(rng), number(rng)))
    asked = rng.choice(("Look up {x}.", "Search for {x}.", "Find {x}."))
    answer = rng.choice(("The result is {r}.", "I found {r}."))
    return ToolUse(
        tool(tool_name, "Looks something up.", **{key: "string"}),
        asked.format(x=thing),
        {key: thing},
        found,
        answer.format(r=found),
    )


def use_timer(rng: Random) -> ToolUse:
    minutes = int(number(rng, (1, 2, 2, 3)))
    return ToolUse(
        tool("set_timer", "Sets a timer.", minutes="integer"),
        f"Set a timer for {minutes} minutes.",
        {"minutes": minutes},
        "ok",
        f"The timer is set for {minutes} minutes.",
    )


def use_message(rng: Random) -> ToolUse:
    to, text = name(rng), word(rng)
    return ToolUse(
        tool("send_message", "Sends a message.", to="string", text="string"),
        f"Send {to} the message {text}.",
        {"to": to, "text": text},
        "sent",
        f"I sent {to} the message {text}.",
    )


def use_invented(rng: Random) -> ToolUse:
    """An invented tool: name and parameter must be read from the prompt."""
    verb = rng.choice(split("get set open find check read"))
    tool_name = f"{verb}_{invented(rng)}"
    key, value = invented(rng), word(rng)
    return ToolUse(
        tool(tool_name, f"Does {verb}.", **{key: "string"}),
        rng.choice(("Use {t} with {v}.", "Call {t} on {v}.")).format(t=tool_name, v=value),
        {key: value},
        rng.choice(("ok", "done")),
        "Done.",
    )


TOOL_USES = (
    use_calculator, use_add, use_weather, use_lookup, use_timer, use_message, use_invented,
)  # fmt: skip


def tool_use(rng: Random) -> Chat:
    """One or two tools are offered; the request needs one, or (sometimes) none."""
    use = rng.choice(TOOL_USES)(rng)
    tools = [use.tool]
    if rng.random() < 0.45:
        other = rng.choice(TOOL_USES)(rng).tool
        if other["function"]["description"] != use.tool["function"]["description"]:
            tools.append(other)
            rng.shuffle(tools)
    if rng.random() < 0.12:
        plain = rng.choice((small_talk, identity, copy_name))(rng)
        return Chat("tool_unused", [m for m in plain.messages if m["role"] != "system"], tools)
    call = {"name": use.tool["function"]["name"], "arguments": use.arguments}
    tool_calls = [{"type": "function", "id": "call_0", "function": call}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": use.request},
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
    ]
    if (system := persona(rng)) is not None:
        messages.insert(0, {"role": "system", "content": system})
    if rng.random() < 0.6:
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": use.result})
        messages.append({"role": "assistant", "content": use.answer})
    return Chat("tool_use", messages, tools)
