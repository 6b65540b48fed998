"""One conversation through a Python client, as its users write it. Run with the client's own
interpreter: ``python python_clients.py <client> <base_url> <key>``. Prints what it was
told, as JSON.

Four requests: a streamed one that calls a tool, its result streamed, a plain one that calls it
again, its result plain. Needs nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

QUESTION = "Where is Köln?"
RESULT = "50.9 N — grüße"
AGAIN = "And again?"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "looks things up",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}, "n": {"type": "number"}},
                "required": ["q"],
            },
        },
    }
]


def added_up(chunks: Iterable[Any]) -> tuple[dict[str, Any], int]:
    """A streamed message as the API's documentation says, and how many pieces of calls came."""
    content, calls, pieces = "", list[dict[str, Any]](), 0
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or []:
            pieces += 1
            if piece.index == len(calls):
                function = {"name": piece.function.name, "arguments": ""}
                calls.append({"id": piece.id, "type": "function", "function": function})
            calls[piece.index]["function"]["arguments"] += piece.function.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return ({**message, "tool_calls": calls} if calls else message), pieces


def whole(answer: Any) -> dict[str, Any]:
    message = answer.choices[0].message
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return out


def conversation(
    ask: Callable[[dict[str, Any]], Any],
    read: Callable[[Any], tuple[dict[str, Any], int]] = added_up,
) -> dict[str, Any]:
    """``ask`` sends a request and returns its answer or chunks; ``read`` adds up chunks."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    texts, calls, pieces = list[str](), list[Any](), 0
    for stream in (True, True, False, False):
        answer = ask({"messages": messages, "tools": TOOLS, "stream": stream})
        reply, came = read(answer) if stream else (whole(answer), 0)
        pieces += came
        texts.append(reply["content"] or "")
        messages.append(reply)
        for call in reply.get("tool_calls", []):
            function = call["function"]
            calls.append([function["name"], json.loads(function["arguments"])])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
        if "tool_calls" not in reply:
            messages.append({"role": "user", "content": AGAIN})
    return {"texts": texts, "calls": calls, "pieces": pieces}


def openai_sync(base_url: str, key: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=key)
    return conversation(lambda asked: client.chat.completions.create(model="policy", **asked))


def openai_async(base_url: str, key: str) -> dict[str, Any]:
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=key)

    async def ask(asked: dict[str, Any]) -> Any:
        answer: Any = await client.chat.completions.create(model="policy", **asked)
        return [chunk async for chunk in answer] if asked["stream"] else answer

    with asyncio.Runner() as runner:
        found = conversation(lambda asked: runner.run(ask(asked)))
        runner.run(client.close())
    return found


def litellm(base_url: str, key: str) -> dict[str, Any]:
    import litellm

    def read(answer: Any) -> tuple[dict[str, Any], int]:
        chunks = list(answer)
        pieces = sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)
        return whole(litellm.stream_chunk_builder(chunks)), pieces

    return conversation(
        lambda asked: litellm.completion("openai/policy", api_base=base_url, api_key=key, **asked),
        read,
    )


def langchain(base_url: str, key: str) -> dict[str, Any]:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=key).bind_tools(TOOLS)  # type: ignore[arg-type]
    messages: list[Any] = [HumanMessage(QUESTION)]
    texts, calls, pieces = list[str](), list[Any](), 0
    for stream in (True, True, False, False):
        if stream:
            answer: Any = None
            for chunk in model.stream(messages):
                pieces += bool(chunk.tool_call_chunks)  # type: ignore[attr-defined]
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(messages)
        assert isinstance(answer, AIMessage)
        texts.append(str(answer.content))
        calls += [[call["name"], call["args"]] for call in answer.tool_calls]
        messages.append(answer)
        messages += [ToolMessage(RESULT, tool_call_id=str(c["id"])) for c in answer.tool_calls]
        if not answer.tool_calls:
            messages.append(HumanMessage(AGAIN))
    return {"texts": texts, "calls": calls, "pieces": pieces}


def crewai(base_url: str, key: str) -> dict[str, Any]:
    """CrewAI runs the tool itself and hands back its result, or the model's text."""
    from crewai import LLM  # type: ignore[import-not-found]

    calls = list[Any]()

    def search(q: str, n: float = 0) -> str:
        calls.append(["search", {"q": q, "n": n}])
        return RESULT

    texts = list[str]()
    for stream in (True, False):
        llm = LLM(model="policy", base_url=base_url, api_key=key, stream=stream)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        result = llm.call(messages, tools=TOOLS, available_functions={"search": search})
        texts.append(str(result))
        texts.append(str(llm.call([{"role": "user", "content": AGAIN}])))
    return {"texts": texts, "calls": calls, "pieces": 0}


CLIENTS = {f.__name__: f for f in (openai_sync, openai_async, litellm, langchain, crewai)}

if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(CLIENTS[sys.argv[1]](*sys.argv[2:4])) + "\n")
