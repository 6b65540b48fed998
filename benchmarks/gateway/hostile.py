"""Requests that are made to be slow, by kind, and a sender of them.

    python hostile.py [KIND ...] < cell.json     send them one after another until the parent ends

The cell is JSON with ``port``, ``key``, ``path`` (of a rollout, to ``/v1``) and ``pause`` (seconds
from one to the next, if it is answered by then). Prints the number of requests and their statuses
by kind when stdin closes.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

LIMIT = 8 * 2**20 - 4096  # of a body

_WORDS = "The quick brown fox is 42 years old, and jumps; over the lazy dog's back.\n"


def _chat(content: str = "Hello.", **more: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": 4, **more}).encode()


def _talk(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"Message {i}."} for i in range(count)]


def _tools(count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return [
        {
            "type": "function",
            "function": {"name": f"f{i}", "description": "d", "parameters": schema},
        }
        for i in range(count)
    ]


def _schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def _format(schema: dict[str, Any]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return _chat(response_format=form)


def _completion(prompt: Any) -> bytes:
    return json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 4}).encode()


def _response(items: Any) -> bytes:
    return json.dumps({"model": "policy", "input": items, "max_output_tokens": 4}).encode()


def _spans(count: int) -> bytes:
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "s", "startTimeUnixNano": "1",
            "endTimeUnixNano": "2", "attributes": []}  # fmt: skip
    scope = {"spans": [{**span, "spanId": f"{i:016x}"} for i in range(1, count + 1)]}
    return json.dumps({"resourceSpans": [{"scopeSpans": [scope]}]}).encode()


def _rewards(count: int) -> bytes:
    return json.dumps({"value": {f"{i}": 1 for i in range(count)}}).encode()


def _text(size: int) -> str:
    return (_WORDS * (size // len(_WORDS) + 1))[:size]


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _arguments(text: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    return [*_user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]


def _picture(size: int) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}]


def _function(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **more}}]


def _claude(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "policy", "max_tokens": 4, "messages": messages}).encode()


_CHAT: dict[str, Callable[[], bytes]] = {
    "text, 20 kB": lambda: _chat(_text(20_000)),
    "text, 1 MB": lambda: _chat(_text(10**6)),
    "text, 8 MiB": lambda: _chat(_text(7 * 2**20)),
    "text, 32 MiB": lambda: _chat(_text(30 * 2**20)),
    "one letter": lambda: _chat("a" * (LIMIT - 200)),
    "spaces": lambda: _chat(" " * (LIMIT - 200)),
    "line ends": lambda: _chat("\n" * (LIMIT // 2 - 200)),
    "special tokens": lambda: _chat("<|im_end|>" * 800_000),
    "escapes": lambda: _chat("\u4e2d" * (LIMIT // 6 - 200)),
    "messages, 4096": lambda: _chat(messages=_talk(4095)),
    "messages, 100,000": lambda: _chat(messages=_talk(100_000)),
    "tools, 1024": lambda: _chat(tools=_tools(1024)),
    "tools, 40,000": lambda: _chat(tools=_tools(40_000)),
    "a tool of 8 MiB": lambda: _chat(tools=_function(description="d" * (LIMIT - 500))),
    "grammar, 1,000 fields": lambda: _format(_schema(1000)),
    "grammar, 50,000 fields": lambda: _format(_schema(50_000)),
    "grammar, values": lambda: _format({"enum": [f"v{i}" for i in range(5_000)]}),
    "pattern": lambda: _format({"type": "string", "pattern": "^((a|b|c){1,1000}){1,1000}$"}),
    "depth": lambda: b"[" * LIMIT,
    "keys": lambda: _chat(metadata={f"k{i}": 1 for i in range(70_000)}),
    "a million keys": lambda: _chat(metadata={f"{i}": 1 for i in range(700_000)}),
    "lists": lambda: b'{"model": [' + b"[]," * 2_500_000 + b"[]]}",
    "a list as the model": lambda: b'{"model": [' + b"1," * 250_000 + b"1]}",
    "junk": lambda: _chat(junk="j" * (LIMIT - 200)),
    "junk, 128 choices": lambda: _chat(junk="j" * 60_000, n=128),
    "stop": lambda: _chat(stop=["s" * (LIMIT // 16 - 50)] * 16),
    "biases": lambda: _chat(logit_bias={str(i): 1 for i in range(70_000)}),
    "parts": lambda: _chat(messages=_user([{"type": "text", "text": "a"}] * 25_000)),
    "images": lambda: _chat(messages=_user(_picture(LIMIT - 500))),
    "arguments": lambda: _chat(messages=_arguments('{"a": "' + "b" * (2**20 - 50) + '"}')),
    "pressed": lambda: gzip.compress(_chat("a" * LIMIT), 1),
    "a bomb": lambda: gzip.compress(b" " * (2**30), 1),
}
_OTHERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompt ids": ("completions", lambda: _completion([5] * 290_000)),
    "prompts": ("completions", lambda: _completion([_text(60_000)] * 128)),
    "prompts, 100,000": ("completions", lambda: _completion(["a"] * 100_000)),
    "input items": ("responses", lambda: _response(_talk(4095))),
    "input text": ("responses", lambda: _response(_text(7 * 2**20))),
    "Messages": ("messages", lambda: _claude(_talk(4095))),
    "count_tokens": ("messages/count_tokens", lambda: _claude(_user(_text(7 * 2**20)))),
    "spans, 9,000": ("traces", lambda: _spans(9_000)),
    "spans, 25,000": ("traces", lambda: _spans(25_000)),
    "rewards": ("rewards", lambda: _rewards(70_000)),
}
JUDGE = {  # of a provider, through LiteLLM
    "judge: text": lambda: _chat(_text(7 * 2**20), model="judge"),
    "judge: messages, 4096": lambda: _chat(messages=_talk(4095), model="judge"),
    "judge: tools, 1024": lambda: _chat(tools=_tools(1024), model="judge"),
    "judge: parts": lambda: _chat(
        messages=_user([{"type": "text", "text": "a"}] * 25_000), model="judge"
    ),
    "judge: image": lambda: _chat(messages=_user(_picture(LIMIT - 500)), model="judge"),
    "judge: images": lambda: _chat(messages=_user(_picture(950) * 8_000), model="judge"),
    "judge: keys": lambda: _chat(metadata={f"k{i}": 1 for i in range(70_000)}, model="judge"),
}
KINDS = {kind: ("chat/completions", body) for kind, body in (_CHAT | JUDGE).items()} | _OTHERS


def main(kinds: list[str]) -> None:
    cell = json.loads(sys.stdin.readline())
    bodies = {kind: KINDS[kind][1]() for kind in kinds or KINDS}
    statuses: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    print("ready", flush=True)
    sent, due = 0, time.perf_counter()
    while not select.select([sys.stdin], [], [], max(due - time.perf_counter(), 0))[0]:
        kind = list(bodies)[sent % len(bodies)]
        sent += 1
        headers = {"content-type": "application/json", "authorization": f"Bearer {cell['key']}"}
        if bodies[kind][:2] == b"\x1f\x8b":
            headers["content-encoding"] = "gzip"
        client = http.client.HTTPConnection("127.0.0.1", cell["port"], timeout=120)
        began, status = time.perf_counter(), "cut"
        due = began + cell["pause"]
        with contextlib.closing(client), contextlib.suppress(OSError, http.client.HTTPException):
            client.request("POST", f"{cell['path']}/{KINDS[kind][0]}", bodies[kind], headers)
            reply = client.getresponse()
            reply.read()
            status = str(reply.status)
        took = time.perf_counter() - began
        slowest[kind] = max(slowest.get(kind, 0.0), took)
        statuses[f"{kind}: {status}"] += 1
    print(json.dumps({"sent": sent, "statuses": statuses, "slowest_s": slowest}))


if __name__ == "__main__":
    main(sys.argv[1:])
