"""Write answers of OpenAI's Responses API, whole or as events.

Knows the API's items and events. Does not know its requests, or tokens.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from agentrl_proxy.errors import ApiError, Names
from agentrl_proxy.protocols import chat_objects

# Said whatever the request asks for: nothing is stored, and a prompt that is too long is refused.
_ALWAYS: dict[str, Any] = {"previous_response_id": None, "store": False, "truncation": "disabled"}
# Fields that an answer repeats from its request, with their defaults.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,  # of built-in tools: there are none, so any limit holds
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}
_INCOMPLETE = {
    "length": {"reason": "max_output_tokens"},
    "content_filter": {"reason": "content_filter"},
}
_FINISH_REASONS = {details["reason"]: reason for reason, details in _INCOMPLETE.items()}
# One item may become several messages, and several items one, so an item's index is lost.
_NAMES: Names = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^messages(\[\d+\][.\w\[\]]*)?", "input"),
        (r"^response_format(\.json_schema)?\b", "text.format"),
        (r"^(tools\[\d+\])\.function\b", r"\1"),
    )
]


class ResponsesDialect:
    """Writes an answer as a response or as its events. Item ids derive from the response's id."""

    id_prefix = "resp_"
    names: Names = _NAMES

    def __init__(self, request: dict[str, Any]) -> None:
        self._repeated = {
            name: default if request.get(name) is None else request[name]
            for name, default in _REPEATED.items()
        } | _ALWAYS
        self._sequence = 0
        self._heading: chat_objects.Heading | None = None  # once the stream has begun
        self._id = ""  # the response's, without its prefix
        self._items = 0  # closed ones, so the open one's index
        self._open: str | None = None  # reasoning, message or function_call
        self._call: dict[str, Any] = {}  # the open function call
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []

    def chunk(
        self,
        heading: chat_objects.Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        out = b""
        if self._heading is None:
            self._heading = heading
            self._id = heading.id.removeprefix(self.id_prefix)
            response = self._response(heading, "in_progress", [], None)
            out = self._event("response.created", response=response)
            out += self._event("response.in_progress", response=response)
        if delta.get("reasoning_content"):
            out += self._open_item("reasoning")
            self._text += delta["reasoning_content"]
            out += self._event(
                "response.reasoning_summary_text.delta",
                **self._place("reasoning"),
                summary_index=0,
                delta=delta["reasoning_content"],
            )
        if delta.get("content"):
            out += self._open_item("message")
            self._text += delta["content"]
            self._logprobs += logprobs or ()
            out += self._event(
                "response.output_text.delta",
                **self._place("message"),
                content_index=0,
                delta=delta["content"],
                logprobs=logprobs or [],
            )
        for call in delta.get("tool_calls") or ():
            if "id" in call:  # the first piece of a call
                out += self._open_call(call)
            arguments = call["function"].get("arguments", "")
            if arguments:
                self._text += arguments
                place = self._place("function_call")
                out += self._event(
                    "response.function_call_arguments.delta", **place, delta=arguments
                )
        return out

    def end(self, response: dict[str, Any]) -> bytes:
        out = self._close_item()
        if not self._items:  # an empty answer still has a message
            out += self._open_item("message") + self._close_item()
        whole = self.whole(response)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(kind, response=whole)

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        [choice] = response["choices"]
        message = choice["message"]
        heading = chat_objects.heading_of(response)
        self._id = heading.id.removeprefix(self.id_prefix)
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            items.append(self._reasoning(message["reasoning_content"]))
        calls = message.get("tool_calls") or []
        if message["content"] or not (calls or items):
            logprobs = None if choice["logprobs"] is None else choice["logprobs"]["content"]
            items.append(self._message(message["content"], logprobs or []))
        items += [_function_call(self._id, i, call) for i, call in enumerate(calls)]
        reason = _INCOMPLETE.get(choice["finish_reason"])
        status = "completed" if reason is None else "incomplete"
        out = self._response(heading, status, items, response["usage"])
        out["incomplete_details"] = reason
        return out

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[tuple[str, str, str]] = []
        entries: list[dict[str, Any]] = []
        for item in said["output"]:
            if item["type"] == "reasoning":
                message["reasoning_content"] = item["summary"][0]["text"]
            elif item["type"] == "message":
                message["content"], entries = (item["content"][0][k] for k in ("text", "logprobs"))
            else:
                calls.append((item["call_id"], item["name"], item["arguments"]))
        message = chat_objects.with_tool_calls(message, calls)
        reason = "tool_calls" if calls else "stop"
        if said["incomplete_details"] is not None:
            reason = _FINISH_REASONS[said["incomplete_details"]["reason"]]
        heading = chat_objects.Heading(said["id"], said["model"], created=said["created_at"])
        usage = chat_objects.usage(said["usage"]["input_tokens"], said["usage"]["output_tokens"])
        choice = chat_objects.choice(0, message, reason, entries or None)
        return chat_objects.completion(heading, [choice], usage)

    def failed(self, error: ApiError) -> bytes:
        assert self._heading is not None  # a stream that has not begun is refused, not failed
        response = self._response(self._heading, "failed", [], None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    # --- events

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._item_id(kind), "output_index": self._items}

    def _open_item(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        out = self._close_item()
        self._open, self._text, self._logprobs = kind, "", []
        if kind == "reasoning":
            item = {**self._reasoning(""), "summary": [], "status": "in_progress"}
            name, at, part = "reasoning_summary", "summary_index", _summary("")
        else:
            item = {**self._message("", []), "content": [], "status": "in_progress"}
            name, at, part = "content", "content_index", _output_text("", [])
        out += self._event("response.output_item.added", output_index=self._items, item=item)
        place = self._place(kind) | {at: 0}
        return out + self._event(f"response.{name}_part.added", **place, part=part)

    def _open_call(self, call: dict[str, Any]) -> bytes:
        out = self._close_item()
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        self._open, self._text = "function_call", ""
        self._call = _function_call(self._id, call["index"], begun)
        item = {**self._call, "status": "in_progress"}
        return out + self._event("response.output_item.added", output_index=self._items, item=item)

    def _close_item(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        place = self._place(kind)
        if kind == "reasoning":
            item = self._reasoning(self._text)
            place["summary_index"] = 0
            out = self._event("response.reasoning_summary_text.done", **place, text=self._text)
            part = _summary(self._text)
            out += self._event("response.reasoning_summary_part.done", **place, part=part)
        elif kind == "function_call":
            item = {**self._call, "arguments": self._text}
            name = "response.function_call_arguments.done"
            out = self._event(name, **place, name=item["name"], arguments=self._text)
        else:
            item = self._message(self._text, self._logprobs)
            place["content_index"] = 0
            out = self._event(
                "response.output_text.done", **place, text=self._text, logprobs=self._logprobs
            )
            part = _output_text(self._text, self._logprobs)
            out += self._event("response.content_part.done", **place, part=part)
        return out + self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        out = self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return out

    # --- objects

    def _response(
        self,
        heading: chat_objects.Heading,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": heading.model,
            "output": output,
            "usage": _usage(usage) if usage else None,  # not every provider reports it
            **self._repeated,
        }

    def _item_id(self, kind: str) -> str:
        if kind == "function_call":
            return self._call["id"]
        return f"rs_{self._id}" if kind == "reasoning" else f"msg_{self._id}"

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {
            "id": self._item_id("reasoning"),
            "type": "reasoning",
            "summary": [_summary(text)],
            "status": "completed",
        }

    def _message(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id("message"),
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [_output_text(text, logprobs)],
        }


def _function_call(response_id: str, index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{response_id}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    read = usage.get("prompt_tokens_details") or {}
    said = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": said.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
