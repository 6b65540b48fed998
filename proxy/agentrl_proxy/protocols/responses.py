"""Read requests of OpenAI's Responses API, and write its answers and events.

conversion.py makes a request one of chat completions. What it refers to by id has been put in its
place before (requests/stored_responses.py); tools that are no functions become such
(response_tools.py). Does not know tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl_proxy.errors import ApiError, Names, invalid
from agentrl_proxy.protocols import conversion, response_tools
from agentrl_proxy.protocols.chat import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    SAMPLING,
    SCHEMA_FORMAT,
    TEMPLATE,
    allowed_tools,
    tool_choice,
)
from agentrl_proxy.protocols.chat_objects import BlockEvents, Heading, entries_of, event, heading_of
from agentrl_proxy.protocols.fields import (
    ANYTHING,
    BOOLEAN,
    NAME,
    NONEMPTY,
    OBJECT,
    TEXT,
    Array,
    Either,
    Object,
    Tagged,
    check_body,
    integer,
    one_of,
    text_or,
)
from agentrl_proxy.protocols.vendor_fields import refuse_unsupported, without_tools

# --- requests

_UNSUPPORTED = {
    "conversation": "continue with `previous_response_id`, or send the whole conversation as "
    "`input` with store: false",
    "prompt": "stored prompts are OpenAI's; send `instructions` and `input`",
    "background": "send it with background: false",
    "response_format": "send `text.format`",
    "guided_json": "send `text.format`",
    "structured_outputs": "send `text.format`",
    "max_tokens": "send `max_output_tokens`",
    "max_completion_tokens": "send `max_output_tokens`",
}
_WITH_LOGPROBS = "message.output_text.logprobs"
_PART = Tagged(
    dict.fromkeys(("input_text", "output_text", "text"), Object(["text"], text=TEXT))
    | {"refusal": Object(["refusal"], refusal=TEXT)},
    default="input_text",
    provider_kinds=dict.fromkeys(("input_image", "input_file", "input_audio"), Object([])),
    refusal=("unsupported_content", "this model reads text only"),
)
_ITEM = Tagged(
    {
        "message": Object(
            ["role", "content"],
            role=one_of("user", "assistant", "system", "developer"),
            content=text_or(_PART),
        ),
        "function_call": Object(
            ["call_id", "name", "arguments"],
            call_id=TEXT,
            name=TEXT,
            arguments=TEXT,
            namespace=TEXT,
        ),
        "function_call_output": Object(["call_id", "output"], call_id=TEXT, output=text_or(_PART)),
        "reasoning": Object(
            [], summary=Array(Tagged({"summary_text": Object(["text"], text=TEXT)}))
        ),
        **response_tools.call_items(_PART),
    },
    default="message",
)
_NO_BUILT_IN = (
    "unsupported_tool",
    "this model has no built-in tools; gateway.leave_out_tools leaves them out",
)
_FORMATS = dict.fromkeys(("text", "json_object"), Object([])) | {"json_schema": SCHEMA_FORMAT}
_NAMED = Object(["name"], name=TEXT)
_ITEMS_SENT = Array(_ITEM, minimum=1, maximum=MAX_MESSAGES)
RESPONSES = Object(
    ["model", "input"],
    model=NAME,
    input=Either("a non-empty string or list of items", str=NONEMPTY, list=_ITEMS_SENT),
    instructions=TEXT,
    previous_response_id=NAME,
    max_output_tokens=MAX_TOKENS,
    max_tool_calls=replace(integer(0), for_provider=None),
    store=BOOLEAN,
    truncation=one_of("auto", "disabled"),
    tools=Array(Tagged(response_tools.TOOLS, refusal=_NO_BUILT_IN), maximum=MAX_TOOLS),
    tool_choice=tool_choice(_NAMED, allowed_tools(_NAMED)),
    text=Object([], format=Tagged(_FORMATS)),
    include=Array(replace(ANYTHING, schema={"enum": [_WITH_LOGPROBS]})),
    reasoning=Object([], effort=NAME),
    metadata=replace(OBJECT, schema={"type": "object", "additionalProperties": TEXT.schema}),
    **SAMPLING,
    **TEMPLATE,
    top_logprobs=integer(0, MAX_TOP_LOGPROBS),
    stream=BOOLEAN,
    parallel_tool_calls=BOOLEAN,
)


def responses_as_chat(
    raw: dict[str, Any], provider_model: str | None = None, *, leave_out: bool = False
) -> tuple[dict[str, Any], ResponsesDialect]:
    """Translate a request of ``/v1/responses`` to the fields of chat completions, and make its
    answer's dialect.

    Args:
        provider_model: LiteLLM's name of the model that answers; None for our own.
        leave_out: leave tools out that only OpenAI runs; else they are refused.

    Raises:
        ApiError: a field is wrong (400).
    """
    original, left_out = raw, list[str]()
    if leave_out:
        raw, left_out = without_tools(raw, response_tools.TOOLS)
    # LiteLLM would drop wrong and unsupported fields silently, or fail on them.
    check_body(RESPONSES, raw, ours=provider_model is None)
    refuse_unsupported(raw, _UNSUPPORTED, ours=provider_model is None)
    raw, free = response_tools.as_functions(raw)
    called = set[str]()
    for i, item in enumerate(raw["input"] if isinstance(raw["input"], list) else ()):
        if item.get("type") == "function_call":
            called.add(item["call_id"])
        elif item.get("type") == "function_call_output" and item["call_id"] not in called:
            where = f"input[{i}].call_id"
            raise invalid(where, f"{where}: no function_call before it has this call_id")
    choice = raw.get("tool_choice")
    allowed = choice if isinstance(choice, dict) and choice["type"] == "allowed_tools" else None
    known = {**raw, "tool_choice": "auto"} if allowed else raw  # LiteLLM does not know it
    if provider_model is None:
        chat = conversion.chat_of_response(known)
        chat |= {name: raw.get(name) for name in TEMPLATE}
        if effort := (raw.get("reasoning") or {}).get("effort"):
            chat["reasoning_effort"] = effort
    else:
        chat = conversion.provider_chat_of_response(known, provider_model)
    if allowed:
        tools = [
            {"type": "function", "function": {"name": one["name"]}} for one in allowed["tools"]
        ]
        allowed = {**allowed, "tools": tools}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    wanted = _WITH_LOGPROBS in (raw.get("include") or ())
    chat |= {
        "stream": raw.get("stream"),
        "logprobs": wanted,  # LiteLLM knows neither
        "top_logprobs": raw.get("top_logprobs") if wanted else None,
    }
    for tool, sent in zip(chat.get("tools") or [], raw.get("tools") or [], strict=True):
        if sent.get("strict") is None:  # LiteLLM says false, and the template would write it
            tool["function"].pop("strict", None)
    for name in ("stop", "seed", "top_k"):  # useful, though not of this API
        if raw.get(name) is not None:
            chat[name] = raw[name]
    if provider_model is None:
        chat |= {"left_out": left_out, "not_enforced": [f"grammar of {name}" for name in free]}
    return chat, ResponsesDialect(original)


# --- answers

# Fields that an answer repeats from its request, with their defaults.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,  # of built-in tools: there are none, so any limit holds
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
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
# By an item's type: its id's prefix, the events of its text and of its part, the part's place.
_ITEMS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "reasoning": ("rs", "reasoning_summary_text", "reasoning_summary_part", {"summary_index": 0}),
    "message": ("msg", "output_text", "content_part", {"content_index": 0}),
    "function_call": ("fc", "function_call_arguments", "", {}),
    "custom_tool_call": ("fc", "custom_tool_call_input", "", {}),
    "local_shell_call": ("fc", "", "", {}),
}


class ResponsesDialect(BlockEvents):
    """Writes an answer as a response or as its events. Item ids derive from the response's id."""

    id_prefix = "resp_"
    # One item may become several messages, and several items one, so an item's index is lost.
    names: Names = (
        (r"^messages(\[\d+\][.\w\[\]]*)?", "input"),
        (r"^response_format(\.json_schema)?\b", "text.format"),
        (r"^(tools\[\d+\])\.function\b", r"\1"),
        (r"^reasoning_effort\b", "reasoning.effort"),
    )
    text_kind = "message"
    call_kind = "function_call"

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self._repeated = {
            name: default if request.get(name) is None else request[name]
            for name, default in _REPEATED.items()
        }
        self._repeated["truncation"] = "disabled"  # a prompt too long is refused
        self._kinds = response_tools.kinds_of(request)
        self._sequence = 0
        self._item: dict[str, Any] = {}  # the open item
        self._said: dict[str, Any] = {}  # its part; a tool call has none, only arguments
        self._call: dict[str, Any] = {}  # the first piece of an open call

    def end(self, response: dict[str, Any]) -> bytes:
        out = self._close()
        if not self._index:  # an empty answer still has a message
            out += self._open("message") + self._close()
        whole = self.whole(response)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(kind, response=whole)

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        [choice] = response["choices"]
        message = choice["message"]
        thought, calls = message.get("reasoning_content"), message.get("tool_calls") or []
        heading = heading_of(response)
        items: list[dict[str, Any]] = []
        if thought:
            items.append(_item("reasoning", heading, thought))
        if message["content"] or not (calls or items):
            items.append(_item("message", heading, message["content"] or "", entries_of(choice)))
        for i, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            items.append(self._call_item(heading, {"index": i, **call}, arguments))
        incomplete = _INCOMPLETE.get(choice["finish_reason"])
        status = "incomplete" if incomplete else "completed"
        said = self._response(heading, status, items, response["usage"])
        return said | {"incomplete_details": incomplete}

    def failed(self, error: ApiError) -> bytes:
        assert self._heading is not None  # a stream that has not begun is refused, not failed
        response = self.unanswered(self._heading, "failed", error.message)
        return self._event("response.failed", response=response)

    def unanswered(self, heading: Heading, status: str, error: str | None) -> dict[str, Any]:
        response = self._response(heading, status, [], {})
        response["error"] = error and {"code": "server_error", "message": error}
        return response

    # --- events

    def _event(self, kind: str, **data: Any) -> bytes:
        out = event(kind, sequence_number=self._sequence, **data)
        self._sequence += 1
        return out

    def _start(self, heading: Heading) -> bytes:
        response = self._response(heading, "in_progress", [], {})
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def _think(self, delta: dict[str, Any]) -> bytes:
        thought = delta.get("reasoning_content")
        return self._switch("reasoning") + self._extend(thought, {}) if thought else b""

    def _opened(self, said: dict[str, Any]) -> bytes:
        assert self._heading is not None
        if self._kind == "function_call":
            self._call, self._said = said, {"arguments": ""}
            self._item = self._call_item(self._heading, said, "")
        else:
            self._item = self._said = _item(self._kind, self._heading)
        added = {**self._item, "status": "in_progress"}
        if parts := {"reasoning": "summary", "message": "content"}.get(self._kind):
            [self._said], added[parts] = self._item[parts], []
        out = self._event("response.output_item.added", output_index=self._index, item=added)
        return out + self._part_event("added")

    def _extend(self, text: str, choice: dict[str, Any]) -> bytes:
        said: dict[str, Any] = {"delta": text}
        self._said["arguments" if self._kind == "function_call" else "text"] += text
        if self._item["type"] in ("custom_tool_call", "local_shell_call"):
            return b""  # it is known once the arguments are whole
        if self._kind == "message":
            said["logprobs"] = entries_of(choice) or []
            self._said["logprobs"] += said["logprobs"]
        return self._item_event(_ITEMS[self._kind][1], "delta", said)

    def _closed(self) -> bytes:
        of, out = self._said, b""
        if self._kind == "function_call":
            assert self._heading is not None
            of = self._item = self._call_item(self._heading, self._call, of["arguments"])
        what = _ITEMS[self._item["type"]][1]
        if "input" in of:
            out += self._item_event(what, "delta", {"delta": of["input"]})
        names = ("name", "arguments", "input", "text", "logprobs")
        said = {name: of[name] for name in names if name in of}
        out += self._item_event(what, "done", said) if what else b""
        out += self._part_event("done")
        done = {"output_index": self._index, "item": self._item}
        return out + self._event("response.output_item.done", **done)

    def _part_event(self, name: str) -> bytes:
        part = _ITEMS[self._kind][2]
        return self._item_event(part, name, {"part": self._said}) if part else b""

    def _item_event(self, what: str, name: str, said: dict[str, Any]) -> bytes:
        place = {"item_id": self._item["id"], "output_index": self._index, **_ITEMS[self._kind][3]}
        return self._event(f"response.{what}.{name}", **place, **said)

    # --- objects

    def _call_item(self, heading: Heading, call: dict[str, Any], arguments: str) -> dict[str, Any]:
        name = call["function"]["name"]
        kind = self._kinds.get(name) or {"type": "function_call", "name": name}
        item = _item(kind["type"], heading)
        item |= {"id": f"{item['id']}_{call['index']}", "call_id": call["id"]}
        return item | response_tools.call_item(kind, arguments)

    def _response(
        self, heading: Heading, status: str, output: list[dict[str, Any]], usage: dict[str, Any]
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


def _item(
    kind: str,
    heading: Heading,
    text: str = "",
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    own = f"{_ITEMS[kind][0]}_{heading.id.removeprefix(ResponsesDialect.id_prefix)}"
    item: dict[str, Any] = {"id": own, "type": kind, "status": "completed"}
    if kind.endswith("_call"):
        return item
    if kind == "reasoning":
        return item | {"summary": [{"type": "summary_text", "text": text}]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    return item | {"role": "assistant", "content": [part]}


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
