"""The mock sampler's own HTTP: what any gateway in front of it can at best come near to.

BENCHMARK_ANSWER=answer.json python direct.py <port>
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

sys.path.insert(0, str(Path(__file__).parents[1]))
import answer

ANSWER = answer.load()
ENTRIES = ANSWER.entries


def heading(kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.MODEL,
    }


def whole(logprobs: bool) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER.text},
        "logprobs": {"content": ENTRIES, "refusal": None} if logprobs else None,
        "finish_reason": "length",
    }
    return orjson.dumps(heading("chat.completion") | {"choices": [choice], "usage": ANSWER.usage})


async def chunks(logprobs: bool) -> AsyncIterator[bytes]:
    head = heading("chat.completion.chunk")
    role: dict[str, str] = {"role": "assistant"}
    for i, token in enumerate(ANSWER.tokens):
        choice = {
            "index": 0,
            "delta": role | {"content": token},
            "logprobs": {"content": [ENTRIES[i]], "refusal": None} if logprobs else None,
            "finish_reason": None,
        }
        role = {}
        yield b"data: " + orjson.dumps(head | {"choices": [choice]}) + b"\n\n"
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    yield b"data: " + orjson.dumps(head | {"choices": [last]}) + b"\n\ndata: [DONE]\n\n"


async def chat(request: Request) -> Response:
    body = orjson.loads(await request.body())
    logprobs = bool(body.get("logprobs"))
    if body.get("stream"):
        return StreamingResponse(chunks(logprobs), media_type="text/event-stream")
    return Response(whole(logprobs), media_type="application/json")


app = FastAPI(openapi_url=None)
app.router.add_route("/v1/chat/completions", chat, methods=["POST"])

if __name__ == "__main__":
    uvicorn.run(
        app, port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False,
        log_level="warning",
    )  # fmt: skip
