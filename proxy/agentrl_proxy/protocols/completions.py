"""Read legacy ``/v1/completions`` requests, and write their answers.

Knows the protocol's fields and objects. Does not know how a prompt is sampled or recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl_proxy.errors import ApiError, Names, invalid
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import (
    CHOICES,
    LOGIT_BIAS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    PROVIDER_CHAT,
    SAMPLING,
    STREAM_OPTIONS,
    ChatRequest,
    chat_request,
)
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
from agentrl_proxy.rendering.renderer import Renderer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
CHAT_ONLY = frozenset(
    ("messages", "tools", "tool_choice", "response_format", "max_completion_tokens")
)
_TOKEN_IDS = Array(integer(0, 2**31 - 1), minimum=1).schema
_TEXTS = Array(NONEMPTY, minimum=1).schema

COMPLETION = Object(
    ["model", "prompt"],
    model=NAME,
    prompt=Value(  # checked with the tokenizer
        lambda v: isinstance(v, str | list),
        "a text, token ids, or a non-empty list of either",
        {
            "anyOf": [
                NONEMPTY.schema,
                _TEXTS,
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ],
        },
    ),
    max_tokens=integer(0),
    echo=BOOLEAN,
    logprobs=replace(integer(0, MAX_TOP_LOGPROBS), for_provider=None),
    n=CHOICES,
    best_of=replace(  # checked against n
        ANYTHING,
        schema=CHOICES.schema | {"description": "no other number than n"},
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
            _TEXTS,
        )
    },
)
"""What a request to a provider's model may hold."""


@dataclass(slots=True)
class CompletionRequest:
    """A checked request: its prompts, and the fields that they share."""

    common: ChatRequest  # without messages
    prompts: list[list[int]]
    dialect: CompletionDialect
    scored: bool  # with the log-probs of the prompts' own tokens

    @property
    def stream(self) -> bool:
        return self.common.stream


def completion_request(raw: dict[str, Any], renderer: Renderer) -> CompletionRequest:
    """Check a request of ``/v1/completions`` to our own model.

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
            "max_tokens": limit or DEFAULT_MAX_TOKENS,
        }
    )
    if limit == 0:  # nothing is sampled
        common.sampling["max_tokens"] = 0
    common.messages = []
    common.raw = raw
    prompts = _prompts(raw["prompt"], renderer)
    check_choices(len(prompts), common.n)
    texts = [renderer.decode_raw(ids) for ids in prompts] if echo else []
    dialect = CompletionDialect(include_usage=common.include_usage, n=common.n, echoed=texts)
    common.dialect = dialect
    return CompletionRequest(common, prompts, dialect, scored)


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
    for name, instead in (
        ("suffix", "put everything before the gap into `prompt`"),
        ("best_of", "ask for `n` choices and choose among them"),
    ):
        same = name == "best_of" and raw.get(name) == (raw.get("n") or 1)
        if raw.get(name) is not None and not same:
            raise invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")


def _prompts(value: str | list[Any], renderer: Renderer) -> list[list[int]]:
    """Tokenize a text, texts, token ids or lists of token ids."""
    if isinstance(value, str) or (value and is_integer(value[0])):
        value = [value]
    if not value:
        raise invalid("prompt", "prompt must be a text, token ids, or a non-empty list of either")
    vocabulary = len(renderer.tokenizer)
    return [_prompt(one, i, renderer, vocabulary) for i, one in enumerate(value)]


def _prompt(value: Any, i: int, renderer: Renderer, vocabulary: int) -> list[int]:
    where = f"prompt[{i}]"
    if isinstance(value, str):
        # No template writes the special tokens here, so the tokenizer adds its own.
        ids = renderer.tokenizer.backend_tokenizer.encode(value, add_special_tokens=True).ids
    elif isinstance(value, list) and all(map(is_integer, value)):
        ids = value
        wrong = next((one for one in ids if not 0 <= one < vocabulary), None)
        if wrong is not None:
            raise invalid(
                "prompt", f"{where}: token ids go from 0 to {vocabulary - 1}; got {wrong}"
            )
    else:
        raise invalid("prompt", f"{where} must be a text or a list of token ids")
    if not ids:
        raise invalid("prompt", f"{where} has no tokens; at least one is needed to continue")
    return ids


@dataclass(slots=True)
class _Said:
    """How far one choice has been streamed."""

    begun: bool = False
    offset: int = 0  # characters in tokens with log-probs


class CompletionDialect:
    """Writes OpenAI's text_completion objects.

    Args:
        n: choices per prompt.
        echoed: the text of each prompt, which begins its choices; empty for no echo.
    """

    id_prefix = "cmpl-"
    names: Names = ()

    def __init__(self, *, include_usage: bool, n: int, echoed: list[str]) -> None:
        self._include_usage = include_usage
        self._n = n
        self._echoed = echoed
        self._said: dict[int, _Said] = {}

    def chunk(
        self,
        heading: chat_objects.Heading,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        said = self._said.setdefault(index, _Said())
        text = delta.get("content") or ""
        if not said.begun:
            said.begun = True
            text = self._echo(index) + text
        if not text and not logprobs and finish_reason is None:
            return b""
        legacy = None
        if logprobs is not None:
            legacy, said.offset = _legacy_logprobs(logprobs, said.offset)
        choice = {
            "index": index,
            "text": text,
            "logprobs": legacy,
            "finish_reason": finish_reason,
        }
        return chat_objects.sse({**heading.fields("text_completion"), "choices": [choice]})

    def end(self, response: dict[str, Any]) -> bytes:
        if not self._include_usage or not response["usage"]:
            return chat_objects.DONE
        heading = chat_objects.heading_of(response).fields("text_completion")
        return (
            chat_objects.sse({**heading, "choices": [], "usage": response["usage"]})
            + chat_objects.DONE
        )

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for one in response["choices"]:
            entries = None if one["logprobs"] is None else one["logprobs"]["content"]
            if "prompt_logprobs" in one:
                entries = one["prompt_logprobs"] + (entries or [])
            choice = {
                "index": one["index"],
                "text": self._echo(one["index"]) + (one["message"]["content"] or ""),
                "logprobs": None if entries is None else _legacy_logprobs(entries, 0)[0],
                "finish_reason": one["finish_reason"],
            }
            if "stop_reason" in one:
                choice["stop_reason"] = one["stop_reason"]
            choices.append(choice)
        heading = chat_objects.heading_of(response).fields("text_completion")
        return {**heading, "choices": choices, "usage": response["usage"] or None}

    def read(self, said: dict[str, Any]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for one in said["choices"]:
            text = one["text"].removeprefix(self._echo(one["index"]))
            entries = None if one["logprobs"] is None else legacy_entries(one["logprobs"])
            message = {"role": "assistant", "content": text}
            choice = chat_objects.choice(one["index"], message, one["finish_reason"], entries)
            if "stop_reason" in one:
                choice["stop_reason"] = one["stop_reason"]
            choices.append(choice)
        heading = chat_objects.heading_of(said)
        return chat_objects.completion(heading, choices, said["usage"])

    def failed(self, error: ApiError) -> bytes:
        return chat_objects.sse(error.body())

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""


def _legacy_logprobs(entries: list[dict[str, Any]], offset: int) -> tuple[dict[str, Any], int]:
    """Return chat's log-prob entries as the legacy object, and the text offset after them."""
    offsets: list[int] = []
    for entry in entries:
        data = entry["bytes"]
        inside = bool(data) and _continues(data[0])  # the token continues a character
        offsets.append(max(offset - inside, 0))
        offset += sum(not _continues(byte) for byte in data)
    legacy = {
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
    return legacy, offset


def legacy_entries(legacy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probs of a text completion as chat's entries. The bytes of a character that
    several tokens share are lost."""
    tops = legacy.get("top_logprobs") or []
    entries: list[dict[str, Any]] = []
    for i, (token, logprob) in enumerate(
        zip(legacy["tokens"], legacy["token_logprobs"], strict=True)
    ):
        top = tops[i] if i < len(tops) and tops[i] else {}
        entry = plain_entry(token, logprob)
        entry["top_logprobs"] = [plain_entry(*pair) for pair in top.items()]
        entries.append(entry)
    return entries


def plain_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80
