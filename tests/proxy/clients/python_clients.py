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


class Deltas:
    """A streamed message added up as the API's documentation says."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.pieces = 0  # chunks that brought a part of a call

    def add(self, delta: Any) -> None:
        self.content += delta.content or ""
        for piece in delta.tool_calls or []:
            self.pieces += 1
            if piece.index == len(self.calls):
                function = {"name": piece.function.name, "arguments": ""}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            self.calls[piece.index]["function"]["arguments"] += piece.function.arguments

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        return {**message, "tool_calls": self.calls} if self.calls else message


def whole(message: Any) -> dict[str, Any]:
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


def told(replies: list[dict[str, Any]], pieces: int) -> dict[str, Any]:
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for reply in replies
        for call in reply.get("tool_calls", [])
    ]
    return {
        "texts": [reply["content"] or "" for reply in replies],
        "calls": calls,
        "pieces": pieces,
    }


def results(reply: dict[str, Any]) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        for call in reply["tool_calls"]
    ]


def openai_sync(base_url: str, key: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=key)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    replies, pieces = list[dict[str, Any]](), 0
    for stream in (True, True, False, False):
        answer: Any = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=stream
        )
        if stream:
            deltas = Deltas()
            for chunk in answer:
                deltas.add(chunk.choices[0].delta)
            reply, pieces = deltas.message(), pieces + deltas.pieces
        else:
            reply = whole(answer.choices[0].message)
        _go_on(messages, replies, reply)
    return told(replies, pieces)


def openai_async(base_url: str, key: str) -> dict[str, Any]:
    return asyncio.run(_openai_async(base_url, key))


async def _openai_async(base_url: str, key: str) -> dict[str, Any]:
    import openai

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    replies, pieces = list[dict[str, Any]](), 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for stream in (True, True, False, False):
            answer: Any = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, stream=stream
            )
            if stream:
                deltas = Deltas()
                async for chunk in answer:
                    deltas.add(chunk.choices[0].delta)
                reply, pieces = deltas.message(), pieces + deltas.pieces
            else:
                reply = whole(answer.choices[0].message)
            _go_on(messages, replies, reply)
    return told(replies, pieces)


def litellm(base_url: str, key: str) -> dict[str, Any]:
    import litellm

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    replies, pieces = list[dict[str, Any]](), 0
    for stream in (True, True, False, False):
        answer: Any = litellm.completion(
            model="openai/policy", api_base=base_url, api_key=key,
            messages=messages, tools=TOOLS, stream=stream,
        )  # fmt: skip
        if stream:
            chunks = list(answer)
            pieces += sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        _go_on(messages, replies, whole(answer.choices[0].message))
    return told(replies, pieces)


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


def _go_on(messages: list[Any], replies: list[dict[str, Any]], reply: dict[str, Any]) -> None:
    replies.append(reply)
    messages.append(reply)
    messages += results(reply) if "tool_calls" in reply else [{"role": "user", "content": AGAIN}]


CLIENTS = {f.__name__: f for f in (openai_sync, openai_async, litellm, langchain, crewai)}

if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(CLIENTS[sys.argv[1]](*sys.argv[2:4])) + "\n")
