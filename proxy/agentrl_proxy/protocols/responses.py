"""OpenAI's Responses API: what a request may hold, and how an answer is said.

Knows the API's fields, items and events. Does not know tokens; LiteLLM reads the request
(translation.py), ChatService or somebody else's model answers it. Nothing is kept between
requests: a client sends the whole conversation, as with chat completions.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from agentrl_proxy.errors import ApiError, Names, invalid
from agentrl_proxy.protocols import chat_objects, translation
from agentrl_proxy.protocols.chat import ChatRequest, chat_request

# Refused unless null or false: the answer would be another one without them.
_UNSUPPORTED = {
    "previous_response_id": "send the whole conversation as `input`; nothing is stored here",
    "conversation": "send the whole conversation as `input`; nothing is stored here",
    "prompt": "stored prompts are OpenAI's; send `instructions` and `input`",
    "background": "send it with background: false",
}
_FORMATS = ("text", "json_object", "json_schema")
_WITH_LOGPROBS = "message.output_text.logprobs"
# What is done, whatever was asked for: nothing is stored, and what is too long is refused.
_ALWAYS: dict[str, Any] = {"previous_response_id": None, "store": False, "truncation": "disabled"}
# What an answer repeats of its request, and what it says where that is silent.
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
# One item may be several messages, and several items one: which it was nobody knows any more.
_NAMES: Names = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^max_(completion_)?tokens\b", "max_output_tokens"),
        (r"^messages(\[\d+\][.\w\[\]]*)?", "input"),
        (r"^response_format(\.json_schema)?\b", "text.format"),
        (r"^(tools\[\d+\])\.function\b", r"\1"),
        (r'\{"type": "function", "function": \{(.*?)\}\}', r'{"type": "function", \1}'),
    )
]
_CUT = {details["reason"]: reason for reason, details in _INCOMPLETE.items()}


def responses_request(raw: dict[str, Any]) -> ChatRequest:
    """The request of ``/v1/responses``, or an ApiError that names the wrong field."""
    chat, dialect = _chat(raw, None)
    try:
        request = chat_request(chat)
    except ApiError as error:
        error.rename(dialect.names)
        raise
    request.raw = raw
    request.dialect = dialect
    return request


def response_elsewhere(raw: dict[str, Any], model: str) -> tuple[dict[str, Any], ResponsesDialect]:
    """A request to somebody else's model (LiteLLM's name) as a chat request's fields, and how the
    answer is said. What the model can read is its provider's to judge."""
    return _chat(raw, model)


def _chat(raw: dict[str, Any], elsewhere: str | None) -> tuple[dict[str, Any], ResponsesDialect]:
    _check(raw, ours=elsewhere is None)
    chat = translation.chat_of_response(raw, elsewhere)
    wanted = _WITH_LOGPROBS in (raw.get("include") or ())
    chat |= {
        "stream": raw.get("stream"),
        "logprobs": wanted,  # LiteLLM knows neither
        "top_logprobs": raw.get("top_logprobs") if wanted else None,
    }
    for tool, sent in zip(chat.get("tools") or [], raw.get("tools") or [], strict=True):
        if sent.get("strict") is None:  # LiteLLM says false, and the template would write it
            tool["function"].pop("strict", None)
    for name in ("stop", "seed", "top_k"):  # not of this API, but of use
        if raw.get(name) is not None:
            chat[name] = raw[name]
    return chat, ResponsesDialect(raw)


def _check(raw: dict[str, Any], *, ours: bool) -> None:
    """Refuses what LiteLLM would drop in silence or stumble over.

    Args:
        ours: whether our model answers, which reads text only.
    """
    model, items = raw.get("model"), raw.get("input")
    if not isinstance(model, str) or not model:
        raise invalid("model", "model must be a non-empty string")
    if not (isinstance(items, str | list) and items):
        raise invalid("input", "input must be a non-empty string or list of items")
    for name, instead in _UNSUPPORTED.items():
        if raw.get(name):
            raise invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")
    for name, kind in (("tools", list), ("include", list), ("text", dict), ("metadata", dict)):
        if raw.get(name) is not None and not isinstance(raw[name], kind):
            raise invalid(name, f"{name} must be {'a list' if kind is list else 'an object'}")
    limit = raw.get("max_tool_calls")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise invalid("max_tool_calls", "max_tool_calls must be an integer of at least 0")
    if raw.get("truncation") not in (None, "auto", "disabled"):
        raise invalid("truncation", "truncation must be auto or disabled")
    if not isinstance(raw.get("store"), bool | None):
        raise invalid("store", "store must be true or false")
    if not isinstance(raw.get("instructions"), str | None):
        raise invalid("instructions", "instructions must be a string")
    choice = raw.get("tool_choice")
    chooses = isinstance(choice, dict) and choice.get("type") == "function"
    if chooses and not isinstance((choice or {}).get("name"), str):
        raise invalid("tool_choice.name", "tool_choice.name must be a string")
    format = (raw.get("text") or {}).get("format") or {"type": "text"}
    kind = format.get("type") if isinstance(format, dict) else None
    if kind not in _FORMATS:
        raise invalid("text.format.type", f"text.format.type must be one of {', '.join(_FORMATS)}")
    for i, tool in enumerate(raw.get("tools") or []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise invalid(f"tools[{i}].type", f"tools[{i}].type must be function; got {kind!r}: "
                          "this model has no built-in tools", code="unsupported_tool")  # fmt: skip
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(f"tools[{i}].name", f"tools[{i}].name must be a non-empty string")
        if not isinstance(tool.get("parameters"), dict | None):
            where = f"tools[{i}].parameters"
            raise invalid(where, f"{where} must be an object, the JSON schema")
    if isinstance(items, list):
        called = set[str]()
        for i, item in enumerate(items):
            _check_item(item, f"input[{i}]", ours)
            if item.get("type") == "function_call":
                called.add(item["call_id"])
            elif item.get("type") == "function_call_output" and item["call_id"] not in called:
                raise invalid(f"input[{i}].call_id", f"input[{i}].call_id: no function_call "
                              "before it has this call_id")  # fmt: skip


def _check_item(item: Any, where: str, ours: bool) -> None:
    if not isinstance(item, dict):
        raise invalid(where, f"{where} must be an object")
    kind = item.get("type", "message")
    if kind == "function_call":
        for name in ("name", "call_id", "arguments"):
            if not isinstance(item.get(name), str):
                raise invalid(f"{where}.{name}", f"{where}.{name} must be a string")
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{where}.call_id", f"{where}.call_id must be a string")
        _check_parts(item.get("output"), f"{where}.output", ours)
    elif kind == "message":
        if item.get("role") not in ("user", "assistant", "system", "developer"):
            raise invalid(f"{where}.role",
                          f"{where}.role must be user, assistant, system or developer")  # fmt: skip
        _check_parts(item.get("content"), f"{where}.content", ours)
    elif kind != "reasoning":
        raise invalid(f"{where}.type", f"{where}.type must be message, function_call, "
                      f"function_call_output or reasoning; got {kind!r}")  # fmt: skip


def _check_parts(content: Any, where: str, ours: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a string or a list of parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            if not ours:
                continue
            raise invalid(f"{where}[{i}]", f"{where}[{i}] is of type {kind}; this model reads "
                          "text only", code="unsupported_content")  # fmt: skip
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise invalid(f"{where}[{i}]", f"{where}[{i}] must be an object like "
                          '{"type": "input_text", "text": "..."}')  # fmt: skip


class ResponsesDialect:
    """A response whole, or as its events. Item ids derive from the response's own."""

    id_prefix = "resp_"
    names: Names = _NAMES

    def __init__(self, request: dict[str, Any]) -> None:
        self._repeated = {
            name: default if request.get(name) is None else request[name]
            for name, default in _REPEATED.items()
        } | _ALWAYS
        self._sequence = 0
        self._heading: chat_objects.Heading | None = None  # once the stream has begun
        self._id = ""  # the response's, less its prefix
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
        if not self._items:  # nothing was said
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
        calls: list[dict[str, Any]] = []
        entries: list[dict[str, Any]] = []
        for item in said["output"]:
            if item["type"] == "reasoning":
                message["reasoning_content"] = item["summary"][0]["text"]
            elif item["type"] == "message":
                message["content"], entries = (item["content"][0][k] for k in ("text", "logprobs"))
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
        reason = "tool_calls" if calls else "stop"
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if said["incomplete_details"] is not None:
            reason = _CUT[said["incomplete_details"]["reason"]]
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
            "usage": _usage(usage) if usage else None,  # not every provider tells
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
