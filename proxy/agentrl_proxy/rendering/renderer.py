"""Render chat messages to token ids and parse token ids to replies, for one tokenizer.

Does not know samplers, attempts or HTTP. Imports ``transformers`` only to parse a reply, and never
torch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

from agentrl_proxy.errors import context_length_exceeded, invalid
from agentrl_proxy.rendering import template_probes as probes
from agentrl_proxy.rendering.prompt_length import exceeds
from agentrl_proxy.rendering.reply import ParsedReply
from agentrl_proxy.rendering.templates import THINKING_SWITCHES, switches
from agentrl_proxy.rendering.templates import response_template as family_template
from agentrl_proxy.rendering.tool_call_parser import ReplyParser, ReplyTemplate, Tools

Message = dict[str, Any]
MAX_VARIANTS = 32  # each takes half a millisecond to make

_LONG_TEXT = 4096  # characters
_ROLES = {"developer": "system", "function": "tool"}
"""Templates that know a developer take a system message for one. A function was OpenAI's tool role
of 2023."""


class Renderer:
    """Renders with the tokenizer's chat template and parses with its response template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        response_template: overrides the tokenizer's own. Default: that of the model family, which
            the chat template reveals.
        stop_ids: ids that end a turn besides the tokenizer's eos, as in generation_config.
        template_kwargs: variables of the chat template, as its thinking switch.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        response_template: dict[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._stop_ids = frozenset(stop_ids)
        self._given = {"response_template": response_template, "stop_ids": self._stop_ids}
        self._variant = lru_cache(MAX_VARIANTS)(self._with_kwargs)
        template = response_template or getattr(tokenizer, "response_template", None)
        chat_template: str = tokenizer.get_chat_template() or ""
        template = template or family_template(chat_template)
        if tokenizer.eos_token_id is not None:
            self._stop_ids |= {tokenizer.eos_token_id}
        self.switches = switches(chat_template)
        self.generation_prompt, self.before_content, self.turn_end = probes.turns(self._written)
        self._text_arguments = probes.takes_text_arguments(self._written)
        self._refused = probes.refused_orders(self._written)
        # "thinking" instead of "reasoning_content": gpt-oss, LFM 2.5.
        self._thinking = bool(re.search(r"message\.thinking\b", chat_template))
        self._thinking_alone = probes.refuses_content_beside_thinking(self._written)
        # The template's end of a turn stops the answer, whatever the tokenizer's eos is.
        end_ids = self.encode(self.turn_end)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if end_ids and end_ids[0] in special:
            self._stop_ids |= {end_ids[0]}
        self._text_of = cache(self._decoded_one)
        self.token_bytes = cache(self._bytes_of)
        """The bytes of a token, which may be part of a character, by its id."""
        self.hidden = self._hidden_ids(special, template)
        self._format = cache(lambda opening: ReplyTemplate(template, opening))
        plain = self._format("")
        self.tells_calls_apart = plain.streams_calls  # before the reply ends
        self.reasoning_marks = plain.reasoning_marks
        self.vocab_size = len(tokenizer)
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)

    def with_switches(
        self, thinking: bool | None, effort: str | None, kwargs: Mapping[str, Any]
    ) -> Renderer:
        """Return the renderer that gives these variables to the chat template.

        Args:
            thinking, effort: for the template's own switches, where it has them.
            kwargs: by the template's names; they go first.

        Raises:
            ApiError: the template reads no variable of this name (400).
        """
        if thinking is None and effort is None and not kwargs:
            return self
        unknown = sorted(kwargs.keys() - self.switches)
        if unknown:
            known = ", ".join(sorted(self.switches)) or "none"
            raise invalid(
                f"chat_template_kwargs.{unknown[0]}",
                f"chat_template_kwargs.{unknown[0]}: the model's chat template reads no such "
                f"variable; it reads {known}",
                code="unsupported_parameter",
            )
        asked: dict[str, Any] = {"reasoning_effort": effort}
        asked |= dict.fromkeys(THINKING_SWITCHES, thinking)
        asked = {k: v for k, v in asked.items() if v is not None and k in self.switches}
        asked |= kwargs
        return self._variant(json.dumps(asked, sort_keys=True)) if asked else self

    def _with_kwargs(self, kwargs: str) -> Renderer:
        given: Any = self._given
        return Renderer(self.tokenizer, template_kwargs=json.loads(kwargs), **given)

    def normalize(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template expects them: text contents, tool arguments as values,
        messages joined where it refuses them in a row."""
        normal: list[Message] = []
        for message in messages:
            role = _ROLES.get(message["role"], message["role"])
            content = message.get("content") or ""
            if not isinstance(content, str):  # protocols accept parts of text only
                content = "".join(part.get("text", part.get("refusal")) for part in content)
            out: Message = {"role": role, "content": content}
            for name in ("name", "tool_call_id"):
                if message.get(name) is not None:
                    out[name] = message[name]
            if role == "assistant":
                reasoning = message.get("reasoning_content") or message.get("reasoning")
                if isinstance(reasoning, str):
                    out["reasoning_content"] = reasoning
                if message.get("tool_calls"):
                    out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
            normal.append(out)
        return self._in_order(normal) if self._refused else normal

    def _in_order(self, messages: list[Message]) -> list[Message]:
        """Join messages that the template refuses in a row, and give the user's role to a system
        message where it refuses one. Codex sends two system messages and two of the user."""
        ordered: list[Message] = []
        for message in messages:
            role, last = message["role"], ordered[-1]["role"] if ordered else "system"
            if role == "system" and (last != role or "system" in self._refused):
                role = "user" if "later system" in self._refused else role
            if ordered and role == last and f"{role} again" in self._refused:
                content = f"{ordered[-1]['content']}\n\n{message['content']}"
                ordered[-1] = {**ordered[-1], "content": content}
            else:
                ordered.append({**message, "role": role})
        return ordered

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        generate: bool = True,
    ) -> str:
        """Return normalized messages as the template writes them.

        Raises:
            ApiError: the template refuses the messages (400).
        """
        if self._text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        if self._thinking:
            messages = [self._with_thinking(message) for message in messages]
        try:
            return self._written(list(messages), tools=tools, add_generation_prompt=generate)
        except Exception as error:  # a template may raise anything
            why = f"{type(error).__name__}: {str(error)[:500]}"
            message = f"the model's chat template refused the messages: {why}"
            raise invalid("messages", message) from None

    def encode(
        self,
        text: str,
        limit: int | None = None,
        *,
        special: bool = False,
        param: str = "messages",
    ) -> list[int]:
        """Return the ids of a text.

        Args:
            limit: the context length. A text that certainly has as many tokens is refused without
                tokenizing all of it.
            special: whether the tokenizer adds its own special tokens. A chat template writes them.
            param: the request's field, for errors.

        Raises:
            ApiError: the text is too long, or not Unicode (400).
        """
        backend = self.tokenizer.backend_tokenizer
        try:
            if len(text) < _LONG_TEXT:
                return backend.encode(text, add_special_tokens=special).ids
            # Other threads run meanwhile; ``encode`` would hold them up.
            encode = backend.encode_batch_fast
            if limit is not None and exceeds(text, limit, lambda one: len(encode([one])[0].ids)):
                raise context_length_exceeded(limit + 1, limit, param, at_least=True)
            return encode([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeEncodeError):
            # Tool arguments are JSON inside a string, which may escape a lone surrogate.
            raise invalid(param, f"{param}: a lone surrogate is not Unicode text") from None

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the prompt ids of wire messages."""
        return self.encode(self.text(self.normalize(messages), tools))

    def is_stop(self, token_id: int) -> bool:
        return token_id in self._stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without hidden special tokens."""
        hidden = self.hidden
        return self.decode_raw([i for i in ids if i not in hidden])

    def decode_raw(self, ids: Sequence[int]) -> str:
        # Half of what a stream decodes is its last token.
        return self._text_of(ids[0]) if len(ids) == 1 else self._decoded(ids)

    def _decoded_one(self, token_id: int) -> str:
        return self._decoded([token_id])

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)

    def opening(self, prompt: str) -> str:
        """Return the begin of the reply with which a prompt's text ends.

        That is ``generation_prompt``; after a tool's result the begin of a thought, as Gemma 4's
        template writes it, or nothing, as DeepSeek's.
        """
        if prompt.endswith(self.generation_prompt):
            return self.generation_prompt
        marks = self.reasoning_marks
        return marks[0] if marks is not None and prompt.endswith(marks[0]) else ""

    def ending(self, text: str) -> str | None:
        """Return the end of the turn with which a text ends: ``turn_end``, or a token that stops
        the model and the whitespace after it, as ``<|call|>``; None: it ends with neither."""
        if self.turn_end and text.endswith(self.turn_end):
            return self.turn_end
        ended = text.rstrip()
        stop = next((one for one in self._stop_texts() if ended.endswith(one)), None)
        return None if stop is None else text[len(ended) - len(stop) :]

    def begins_with_stop(self, text: str) -> bool:
        """Whether a text begins with a token that stops the model."""
        return text.startswith(self._stop_texts())

    def parser(
        self, *, tools: Tools, opening: str | None = None, one_call: bool = False
    ) -> ReplyParser:
        """Return a parser for one reply.

        Args:
            opening: what ``opening`` says of the prompt. Default: ``generation_prompt``.
            one_call: whether the reply ends where a second tool call begins.
        """
        opening = self.generation_prompt if opening is None else opening
        marks = self.reasoning_marks
        if marks is not None and marks[1] in opening.partition(marks[0])[2]:
            opening = ""  # a thought that the prompt closes is no reply
        return ReplyParser(self._format(opening), tools=tools, one_call=one_call)

    def parse(self, ids: Sequence[int], *, tools: bool = True) -> ParsedReply:
        """Parse response ids into content, tool calls and reasoning."""
        return self.parser(tools=tools).finish(self.decode(ids))

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.tokenizer.backend_tokenizer.id_to_token(token_id) or ""
        if self._byte_level and token_id not in self.tokenizer.added_tokens_decoder:
            return bytes(BYTE_OF[char] for char in token if char in BYTE_OF)
        return self.decode_raw([token_id]).encode() if token else b""

    def _written(self, messages: list[Message], **settings: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, **settings, **self.template_kwargs
        )

    def _with_thinking(self, message: Message) -> Message:
        thought, content = message.get("reasoning_content"), message["content"]
        if not thought:
            return message
        if self._thinking_alone and content and message.get("tool_calls"):
            return {**message, "thinking": f"{thought}\n\n{content}", "content": ""}
        return {**message, "thinking": thought}

    def _stop_texts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.decode_raw([i]) for i in sorted(self._stop_ids))))

    def _hidden_ids(self, special: set[int], template: dict[str, Any]) -> frozenset[int]:
        """Return special tokens, except those that the response template contains."""
        patterns = "\n".join(_strings(template))
        hidden = set(self._stop_ids)
        for i in special:
            token = self.decode_raw([i])
            if not token or (token not in patterns and re.escape(token) not in patterns):
                hidden.add(i)
        return frozenset(hidden)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return list(chain.from_iterable(map(_strings, value))) if isinstance(value, Iterable) else []


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # orjson would turn integers beyond 64 bits into floats. The template gets invalid JSON as
        # the client sent it.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    out: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    out["function"] = {"name": function["name"], "arguments": arguments}
    return out


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
"""By character, the byte that GPT-2's byte-level vocabularies write as it."""
for _byte in sorted({*range(256)} - {*_PRINTABLE}):
    BYTE_OF[chr(0x100 + len(BYTE_OF) - len(_PRINTABLE))] = _byte
