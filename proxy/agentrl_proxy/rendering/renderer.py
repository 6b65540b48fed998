"""Between chat messages and token ids: the tokenizer's chat template, both ways.

Knows the tokenizer, its template and its response format. Does not know samplers, attempts or
HTTP. ``transformers`` is imported only when a reply has to be parsed, torch never.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl_proxy.errors import invalid
from agentrl_proxy.rendering.templates import response_template as family_template
from agentrl_proxy.rendering.tool_call_parser import ParsedReply, ReplyParser, ReplyTemplate, Tools

Message = dict[str, Any]


class Renderer:
    """Renders messages to prompt ids and parses response ids, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        response_template: overrides the tokenizer's own; the default is its family's, told by the
            chat template.
        stop_ids: ids that end a turn besides the tokenizer's eos (generation_config lists them).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        response_template: dict[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        template = response_template or getattr(tokenizer, "response_template", None)
        chat_template: str = tokenizer.get_chat_template() or ""
        template = template or family_template(chat_template)
        self._stop_ids = frozenset(stop_ids)
        if tokenizer.eos_token_id is not None:
            self._stop_ids |= {tokenizer.eos_token_id}
        self._knows_developer = "developer" in chat_template
        self.generation_prompt, self.turn_end = self._probe_turns()
        self._text_arguments = self._probe_arguments()
        # The end of a turn ends it for the template, whatever the tokenizer calls its eos.
        end_ids = self.encode(self.turn_end)
        special = set(_special_tokens(tokenizer))
        if end_ids and end_ids[0] in special:
            self._stop_ids |= {end_ids[0]}
        self._texts: dict[int, str] = {}  # of single tokens
        self._hidden = self._hidden_ids(special, template)
        self._format = ReplyTemplate(template, self.generation_prompt)
        self.vocab_size = len(tokenizer)
        self._unopened = ReplyTemplate(template, "")
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        self._token_bytes: dict[int, bytes] = {}

    # --- messages to ids

    def normalize(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as templates want them: text contents, tool arguments as values."""
        return [self._normalize_one(message, i) for i, message in enumerate(messages)]

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        generate: bool = True,
    ) -> str:
        """Normalised messages as the template writes them."""

        if self._text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generate, tokenize=False
            )
        except Exception as error:  # a template is a program, and fails like one
            raise invalid(
                "messages",
                "the model's chat template refused the messages: "
                f"{type(error).__name__}: {str(error)[:500]}",
            ) from None

    def encode(self, text: str) -> list[int]:
        # As apply_chat_template(tokenize=True) does: the template writes the special tokens.
        try:
            return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            # JSON text inside a string (tool arguments) may say what JSON itself may not.
            raise invalid(
                "messages", "messages contain a lone surrogate: no Unicode text"
            ) from None

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Prompt ids of raw (wire) messages."""
        return self.encode(self.text(self.normalize(messages), tools))

    # --- ids to text and replies

    def is_stop(self, token_id: int) -> bool:
        return token_id in self._stop_ids

    def is_hidden(self, token_id: int) -> bool:
        """Special tokens that are no part of the text a client sees."""
        return token_id in self._hidden

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens that carry no text left out."""
        hidden = self._hidden
        return self.decode_raw([i for i in ids if i not in hidden])

    def decode_raw(self, ids: Sequence[int]) -> str:
        if len(ids) != 1:
            return self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        (token_id,) = ids  # half of what a stream decodes: what came before its next token
        text = self._texts.get(token_id)
        if text is None:
            text = self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
            self._texts[token_id] = text
        return text

    @property
    def tells_calls_apart(self) -> bool:
        """Whether a reply's calls are told apart while they are written."""
        return self._format.streams_calls

    def parser(self, *, tools: Tools, opened: bool = True, one_call: bool = False) -> ReplyParser:
        """Reads one reply's text, in pieces or at once.

        Args:
            opened: whether the prompt ended with ``generation_prompt``. DeepSeek's templates open
                no turn after a tool's result.
            one_call: whether the reply ends where a second tool call begins.
        """
        format = self._format if opened else self._unopened
        return ReplyParser(format, tools=tools, one_call=one_call)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """What opens and closes the reasoning of a reply; None if replies have none."""
        return self._format.reasoning_marks

    def parse(self, ids: Sequence[int], *, tools: bool = True) -> ParsedReply:
        """What response ids say: content, tool calls, reasoning."""
        parser = self.parser(tools=tools)
        parser.feed(self.decode(ids))
        return parser.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: part of a character, sometimes."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    # --- inside

    def _normalize_one(self, message: Message, index: int) -> Message:
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            role = "system"
        if role == "function":  # the tool role of 2023
            role = "tool"
        out: Message = {"role": role, "content": _text_of(message.get("content"), index)}
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                out[name] = message[name]
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            if isinstance(reasoning, str):
                out["reasoning_content"] = reasoning
            if message.get("tool_calls"):
                out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        return out

    def _probe_turns(self) -> tuple[str, str]:
        """What the template writes to open an assistant's turn, and to close one.

        Read off a dummy conversation; ("", "") where the template resists, which only turns off
        the continuing of conversations.
        """
        dummy = "DUMMYREPLY"
        user = {"role": "user", "content": "x"}
        try:
            asked = self.tokenizer.apply_chat_template(
                [user], add_generation_prompt=False, tokenize=False
            )
            opened = self.tokenizer.apply_chat_template(
                [user], add_generation_prompt=True, tokenize=False
            )
            replied = self.tokenizer.apply_chat_template(
                [user, {"role": "assistant", "content": dummy}], tokenize=False
            )
        except Exception:  # a template may raise anything; then it is simply not probed
            return "", ""
        opening = opened[len(asked) :] if opened.startswith(asked) else ""
        _, found, ending = replied.rpartition(dummy)
        return opening, ending if found else ""

    def _probe_arguments(self) -> bool:
        """Whether the template wants a tool call's arguments as text (DeepSeek), not as values."""
        for arguments, as_text in (({"DUMMYKEY": "v"}, False), ('{"DUMMYKEY": "v"}', True)):
            function = {"name": "f", "arguments": arguments}
            call = {"type": "function", "id": "x", "function": function}
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": "x"}, reply], tokenize=False
                )
            except Exception:  # a template may raise anything; without tools it may still serve
                continue
            if '"DUMMYKEY"' in text and "'DUMMYKEY'" not in text:
                return as_text
        return False

    def _hidden_ids(self, special: set[int], template: dict[str, Any]) -> frozenset[int]:
        """Special tokens, less those whose text the response format is made of."""
        patterns = json.dumps(template, ensure_ascii=False)
        spoken = set[int]()
        for i in special:
            token = self.decode_raw([i])
            escaped = json.dumps(re.escape(token), ensure_ascii=False)[1:-1]
            if token and (token in patterns or escaped in patterns):
                spoken.add(i)
        return frozenset(special - spoken) | self._stop_ids

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.tokenizer.backend_tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and token_id not in self.tokenizer.added_tokens_decoder:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        return self.decode_raw([token_id]).encode()


def _special_tokens(tokenizer: Any) -> Iterable[int]:
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            yield token_id


def _text_of(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for i, part in enumerate(content):
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):  # openai_types refuses these earlier; other callers may not
            where = f"messages[{index}].content[{i}]"
            raise invalid(where, f"{where} is not text; this model reads text only",
                          code="unsupported_content")  # fmt: skip
        texts.append(text)
    return "".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # The standard parser, as orjson turns integers beyond 64 bits into floats. If it is no
        # JSON at all, the template gets what the client sent.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    out: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    out["function"] = {"name": function["name"], "arguments": arguments}
    return out


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_arguments_written(call) for call in calls]}


def _with_arguments_written(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, read backwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
