"""Read legacy ``/v1/completions`` requests, and write their answers.

Knows the protocol's fields and objects. Does not know how a prompt is sampled or recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from agentrl_proxy.errors import context_length_exceeded, invalid
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import (
    CHOICES,
    LOGIT_BIAS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    PROVIDER_CHAT,
    SAMPLING,
    STREAM_OPTIONS,
    TEMPLATE,
    ChatRequest,
    chat_request,
)
from agentrl_proxy.protocols.chat_objects import ChatDialect
from agentrl_proxy.protocols.fields import (
    ANYTHING,
    BOOLEAN,
    NAME,
    NONEMPTY,
    Array,
    Object,
    Value,
    check_body,
    integer,
    is_integer,
)
from agentrl_proxy.protocols.vendor_fields import refuse_unsupported
from agentrl_proxy.rendering.renderer import Renderer

CHAT_ONLY = {
    "messages", "tools", "tool_choice", "response_format", "max_completion_tokens", *TEMPLATE,
    "thinking", "reasoning",
}  # fmt: skip
_UNSUPPORTED = {
    **dict.fromkeys(
        ("response_format", "guided_json", "structured_outputs"), "ask /v1/chat/completions"
    ),
    "suffix": "put everything before the gap into `prompt`",
    "best_of": "ask for `n` choices and choose among them",
}
_TOKEN_IDS = Array(integer(0, 2**31 - 1), minimum=1)
_TEXTS = Array(NONEMPTY, minimum=1)
_PROMPTS = (NONEMPTY, _TEXTS, _TOKEN_IDS, Array(_TOKEN_IDS, minimum=1))

COMPLETION = Object(
    ["model", "prompt"],
    model=NAME,
    prompt=Value(  # checked with the tokenizer
        lambda v: isinstance(v, str | list),
        "a text, token ids, or a non-empty list of either",
        {"anyOf": [one.schema for one in _PROMPTS]},
    ),
    max_tokens=integer(0),
    echo=BOOLEAN,
    logprobs=replace(integer(0, MAX_TOP_LOGPROBS), for_provider=None),
    n=CHOICES,
    best_of=replace(  # checked against n
        ANYTHING, schema=CHOICES.schema | {"description": "no other number than n"}
    ),
    suffix=replace(ANYTHING, schema={"type": "null"}),
    **SAMPLING,
    stream=BOOLEAN,
    stream_options=STREAM_OPTIONS,
    logit_bias=LOGIT_BIAS,
    return_token_ids=BOOLEAN,
)
PROVIDER_COMPLETION = Object(
    COMPLETION.required,
    **{name: one for name, one in PROVIDER_CHAT.properties.items() if name not in CHAT_ONLY}
    | COMPLETION.properties
    | {
        "prompt": Value(
            lambda v: (
                isinstance(v, str)
                or (isinstance(v, list) and v != [] and all(isinstance(one, str) for one in v))
            ),
            "a text or a non-empty list of texts: a provider's model does not know our token ids",
            _TEXTS.schema,
        )
    },
)
"""What a request to a provider's model may hold."""


def completion_requests(
    raw: dict[str, Any], renderer: Renderer, context_length: int | None
) -> list[ChatRequest]:
    """Check a request of ``/v1/completions`` to our own model; return a request for each prompt.

    Raises:
        ApiError: a field is wrong (400); it names the field.
    """
    check_completion(raw)
    echo, logprobs, limit = bool(raw.get("echo")), raw.get("logprobs"), raw.get("max_tokens")
    scored = echo and logprobs is not None
    if scored and raw.get("stream"):
        raise invalid("stream", "echo and logprobs together are not streamed; send stream: false",
                      code="unsupported_parameter")  # fmt: skip
    if limit == 0 and not echo:
        raise invalid("max_tokens", "max_tokens must be an integer of at least 1, or 0 with echo")
    common = chat_request(
        {k: v for k, v in raw.items() if k not in CHAT_ONLY}
        | {
            "messages": [{"role": "user", "content": ""}],  # a chat needs one
            "logprobs": logprobs is not None,
            "top_logprobs": logprobs,
            "max_tokens": None,
        }
    )
    common.sampling["max_tokens"] = 16 if limit is None else limit  # OpenAI's default
    prompts = _prompts(raw["prompt"], renderer, context_length, common.n)
    echoed = [renderer.decode_raw(ids) for ids in prompts] if echo else []
    dialect = CompletionDialect(raw, common.n, echoed, prompts)
    common = replace(common, messages=[], raw=raw, dialect=dialect, scored=scored)
    return [
        replace(common, prompt_ids=ids, first_choice=i * common.n) for i, ids in enumerate(prompts)
    ]


def check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise invalid("prompt", f"{prompts} prompts times n={n} are more than "
                      f"{MAX_CHOICES} choices")  # fmt: skip


def check_completion(raw: Mapping[str, Any], *, ours: bool = True) -> None:
    """Check the fields of a request to our own model or a provider's.

    Raises:
        ApiError: a field is wrong or unsupported (400).
    """
    check_body(COMPLETION if ours else PROVIDER_COMPLETION, raw, ours=ours)
    same = raw.get("best_of") in (None, raw.get("n") or 1)
    asked = {**raw, "suffix": raw.get("suffix") is not None, "best_of": not same}
    passed_on = () if ours else PROVIDER_COMPLETION.properties
    refuse_unsupported(asked, _UNSUPPORTED, ours=ours, passed_on=passed_on)


def _prompts(
    value: str | list[Any], renderer: Renderer, context_length: int | None, n: int
) -> list[list[int]]:
    """Tokenize a text, texts, token ids or lists of token ids, none of them too long."""
    if isinstance(value, str) or (value and is_integer(value[0])):
        value = [value]
    if not value:
        raise invalid("prompt", "prompt must be a text, token ids, or a non-empty list of either")
    check_choices(len(value), n)
    last = renderer.vocab_size - 1
    prompts: list[list[int]] = []
    for i, ids in enumerate(value):
        if isinstance(ids, str):
            # No template writes the special tokens here, so the tokenizer adds its own.
            ids = renderer.encode(ids, context_length, special=True, param="prompt")
        elif not isinstance(ids, list) or not all(map(is_integer, ids)):
            raise invalid("prompt", f"prompt[{i}] must be a text or a list of token ids")
        elif (wrong := next((one for one in ids if not 0 <= one <= last), None)) is not None:
            raise invalid("prompt", f"prompt[{i}]: token ids go from 0 to {last}; got {wrong}")
        if not ids:
            message = f"prompt[{i}] has no tokens; at least one is needed to continue"
            raise invalid("prompt", message)
        if context_length is not None and len(ids) >= context_length:
            raise context_length_exceeded(len(ids), context_length, "prompt")
        prompts.append(ids)
    return prompts


class CompletionDialect(ChatDialect):
    """Writes OpenAI's text_completion objects.

    Args:
        n: choices per prompt.
        echoed: the text of each prompt, which begins its choices; empty for no echo.
        prompts: the ids of each, where they are our own model's.
    """

    id_prefix = "cmpl-"
    chunk_kind = "text_completion"

    def __init__(
        self, request: Mapping[str, Any], n: int, echoed: list[str],
        prompts: Sequence[list[int]] = (),
    ) -> None:  # fmt: skip
        super().__init__(request)
        self._n, self._echoed, self._prompts = n, echoed, prompts
        self._offsets: dict[int, int] = {}  # of begun choices: characters with log-probs so far

    def chunk(self, heading: chat_objects.Heading, choice: dict[str, Any]) -> bytes:
        index, entries = choice["index"], chat_objects.entries_of(choice)
        text = choice["delta"].get("content") or ""
        if index not in self._offsets:
            self._offsets[index] = 0
            text = self._echo(index) + text
        if not text and not entries and choice["finish_reason"] is None:
            return b""
        said, self._offsets[index] = _text_choice(choice, text, entries, self._offsets[index])
        said |= self._ids(choice)
        return chat_objects.sse({**heading.fields(self.chunk_kind), "choices": [said]})

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for one in response["choices"]:
            entries = chat_objects.entries_of(one)
            if "prompt_logprobs" in one:
                entries = one["prompt_logprobs"] + (entries or [])
            text = self._echo(one["index"]) + (one["message"]["content"] or "")
            choices.append(_text_choice(one, text, entries, 0)[0] | self._ids(one))
        heading = chat_objects.heading_of(response).fields(self.chunk_kind)
        return {**heading, "choices": choices, "usage": response["usage"] or None}

    def _ids(self, choice: dict[str, Any]) -> dict[str, list[int]]:
        """Return what ``return_token_ids`` asks for, as vLLM names it."""
        if "token_ids" not in choice:
            return {}
        prompt = self._prompts[choice["index"] // self._n]
        return {"prompt_token_ids": prompt, "token_ids": choice["token_ids"]}

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""


def _text_choice(
    choice: dict[str, Any], text: str, entries: list[dict[str, Any]] | None, offset: int
) -> tuple[dict[str, Any], int]:
    """Return a chat's choice as a text completion's, and the text offset after its log-probs."""
    logprobs = None
    if entries is not None:
        offsets: list[int] = []
        for entry in entries:
            begins = [byte & 0xC0 != 0x80 for byte in entry["bytes"]]  # a character of UTF-8
            inside = begins[:1] == [False]  # the token continues a character
            offsets.append(max(offset - inside, 0))
            offset += sum(begins)
        logprobs = {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                None
                if entry["logprob"] is None  # a prompt's first token
                else {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in entries
            ],
            "text_offset": offsets,
        }
    said = {"index": choice["index"], "text": text, "logprobs": logprobs}
    return said | {k: choice[k] for k in ("finish_reason", "stop_reason") if k in choice}, offset


def legacy_entries(legacy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probs of a text completion as chat's entries. The bytes of a character that
    several tokens share are lost."""
    pairs = zip(legacy["tokens"], legacy["token_logprobs"], strict=True)
    tops = chain(legacy.get("top_logprobs") or (), repeat(None))
    return [
        plain_entry(*pair) | {"top_logprobs": [plain_entry(*one) for one in (top or {}).items()]}
        for pair, top in zip(pairs, tops, strict=False)
    ]


def plain_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
