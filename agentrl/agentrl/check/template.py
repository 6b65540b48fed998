"""Try out what a model's chat template can do: tools, thinking, turns that stay as they were."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from agentrl.findings import Finding, Thinking
from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.continuity import Conversations, remember_reply, render_prompt
from agentrl_proxy.rendering.renderer import Message, Renderer

_USER: Message = {"role": "user", "content": "Name a color."}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up_color",
        "description": "Look up a color.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
_CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up_color", "arguments": '{"name": "blue"}'},
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call_1", "content": "#0000ff"}


def template_findings(
    renderer: Renderer, thinking: bool | None, *, calls_with_tools: int
) -> Iterator[Finding]:
    """Say what the template knows.

    Args:
        thinking: the setting ``sampler.thinking``.
        calls_with_tools: of the calls that the agent made.
    """
    if knows_tools(renderer):
        yield Finding("knows tools")
    else:
        sent = f"the agent sent some in {calls_with_tools} calls, and the model never saw them"
        fix = "choose a model whose template knows tools, or describe them in the prompt"
        if calls_with_tools:
            yield Finding(f"does not know tools; {sent}", fix)
        else:
            yield Finding("does not know tools; the agent sent none")
    yield Finding(_thinking(Thinking.of(renderer), thinking))
    if rewritten := rewritten_turns(renderer):
        what = " and ".join(rewritten)
        yield Finding(
            f"writes earlier turns with {what} differently later, so that calls do not continue; "
            "then each trains as a row of its own, which is right, and takes longer"
        )
    else:
        yield Finding("keeps earlier turns unchanged, so that calls can continue")


def knows_tools(renderer: Renderer) -> bool:
    """Tell whether the template writes the tools of a request into the prompt."""
    try:
        return _TOOL["function"]["name"] in renderer.text([_USER], [_TOOL])
    except ApiError:
        return False


def rewritten_turns(renderer: Renderer) -> list[str]:
    """Return the kinds of replies after which the next prompt does not begin with their tokens."""
    text = {"role": "assistant", "content": "Blue."}
    kinds: dict[str, tuple[Message, Message, Any]] = {"text": (text, _USER, None)}
    if Thinking.of(renderer) is not None:
        kinds["reasoning"] = ({**text, "reasoning_content": "Which one?"}, _USER, None)
    if knows_tools(renderer):
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        kinds["tool calls"] = (called, _RESULT, [_TOOL])
    rewritten: list[str] = []
    for kind, (reply, then, tools) in kinds.items():
        with contextlib.suppress(ApiError):  # the template refuses such messages
            if not _continues(renderer, reply, then, tools):
                rewritten.append(kind)
    return rewritten


def _continues(renderer: Renderer, reply: Message, then: Message, tools: Any) -> bool:
    """Tell whether a conversation goes on with the tokens that it had."""
    had = Conversations()
    asked = render_prompt(renderer, had, [_USER], tools, None)
    whole = renderer.text(renderer.normalize([_USER, reply]), tools, generate=False)
    if not whole.startswith(asked.text):  # as where the prompt opens a thought
        return False
    sampled = whole[len(asked.text) :].removesuffix(renderer.turn_end)
    if (marks := renderer.reasoning_marks) and "reasoning_content" not in reply:
        # Qwen3's template writes an empty thought before the last reply.
        opens, closes = map(re.escape, marks)
        sampled = re.sub(rf"^\s*{opens}\s*{closes}\s*", "", sampled)
    ids = renderer.encode(sampled)
    remember_reply(renderer, had, asked, reply, ids, reply["content"], cut=False)
    return render_prompt(renderer, had, [_USER, reply, then], tools, None).branched is None


def _thinking(known: Thinking | None, wanted: bool | None) -> str:
    if known is None:
        return "does not think before it answers"
    on = known.by_default if wanted is None else wanted
    if known.switch is None:
        on = known.by_default
    said = {True: "is on", False: "is off", None: "is up to the model"}[on]
    how = "--sampler.thinking true or false turns it" if known.switch else "there is no switch"
    return f"thinking {said}; {how}"
