"""Continue a conversation with the exact tokens that it has had so far.

A reply goes back to the model as the tokens it sampled, not as its text tokenized again. So the
turns of a rollout become one row of training data, and the sampler's KV cache hits. Where the agent
or the chat template changed history (an edit, a summary, stripped thinking), the messages are
rendered anew and a new branch starts. Does not know samplers, the store or HTTP.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import orjson

from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.renderer import Message, Renderer

MAX_CONVERSATIONS = 256  # per attempt; least recently used go first
MAX_TOKENS = 2_000_000  # per attempt, four bytes each; those that turns share count for each
_LONG_CONTENT = 16 * 1024  # characters
_COMPARED_AS_TEXT = 4  # replies of a request, the last ones, that are found by their prompt's text


class Branch(StrEnum):
    """Why a prompt does not continue the last reply in it, token for token."""

    NO_ROLLOUT = "no_rollout"  # requests outside rollouts are not remembered
    FIRST_CALL = "first_call"
    NEW_CONVERSATION = "new_conversation"  # it has no reply yet
    TOOLS_CHANGED = "tools_changed"
    SWITCHES_CHANGED = "template_switches_changed"  # of the chat template, as its thinking switch
    MODEL_CHANGED = "model_changed"  # another adapter replied
    HISTORY_EDITED = "history_edited"  # an earlier message or the reply was never so
    COMPACTED = "compacted"  # new or edited, after the agent's compaction; see AttemptMemory
    REPLY_CUT = "reply_cut"  # its last tokens are missing, as a stop string's
    THINKING_STRIPPED = "thinking_stripped"  # by the chat template, as Qwen3's does, or the agent
    TEMPLATE_REWRITES = "template_rewrites"  # the template writes the past differently


class ConversationKey(NamedTuple):
    """Identifies a conversation: digests of its messages and tools, the adapter, and the switches
    of the chat template."""

    messages: bytes
    tools: bytes
    adapter: str | None
    switches: bytes = b""

    def then(self, message: Message) -> ConversationKey:
        """Return the key of the conversation with one more message."""
        if calls := message.get("tool_calls"):
            # Compare calls by value and without ids: frameworks make up their own.
            message = {**message, "tool_calls": [call["function"] for call in calls]}
        if len(content := message["content"]) > _LONG_CONTENT:
            # Hashing lets other threads run; escaping it as JSON would hold them up.
            hashed = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16)
            message = {**message, "content": hashed.hexdigest()}
        return self._replace(messages=_digest(message, self.messages))


class Said:
    """The tokens of a remembered conversation. Those of its earlier turns are shared with them.

    Args:
        ids: all tokens, which begin with those of ``before``.
        asked: digest of the prompt's text, as the template wrote it.
        reply: the conversation's last message, normalized.
        sampled: all tokens of the reply, which begins at ``start``; ``ids`` lack the turn's end and
            a stop string.
    """

    __slots__ = ("_before", "_own", "asked", "length", "reply", "sampled", "start")

    def __init__(
        self,
        ids: Sequence[int],
        before: Said | None = None,
        asked: bytes = b"",
        reply: Message | None = None,
        sampled: Sequence[int] = (),
        start: int = 0,
    ) -> None:
        shared = 0 if before is None else before.length
        self._before = before
        self._own = array("i", ids[shared:])
        self.length = len(ids)
        self.asked, self.reply = asked, reply or {}
        self.sampled, self.start = array("i", sampled), start

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        said: Said | None = self
        while said is not None:
            parts.append(said._own)
            said = said._before
        return list(chain.from_iterable(reversed(parts)))

    def is_whole_in(self, ids: Sequence[int]) -> bool:
        """Whether a prompt that continues it has all tokens of the reply."""
        return array("i", ids[self.start : self.start + len(self.sampled)]) == self.sampled


@dataclass(frozen=True, slots=True)
class Prompt:
    """The sampler's input, and what is needed to remember its reply."""

    ids: list[int]
    text: str  # as the template wrote it
    messages: list[Message]  # normalized
    key: ConversationKey
    continues: Said | None  # an earlier call, with whose exact tokens it begins
    branched: Branch | None = None
    """None: the prompt continues the last reply in it. A branch may still continue an earlier one:
    an edit keeps what was before it."""
    opening: str | None = None  # see Renderer.opening


class Conversations:
    """The conversations of one attempt, token for token. Bounded."""

    def __init__(self) -> None:
        self._said: OrderedDict[ConversationKey, Said] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._said)

    def put(self, key: ConversationKey, said: Said) -> None:
        old = self._said.pop(key, None)
        self._total += said.length - (0 if old is None else old.length)
        self._said[key] = said
        while self._said and (len(self._said) > MAX_CONVERSATIONS or self._total > MAX_TOKENS):
            self._total -= self._said.popitem(last=False)[1].length

    def get(self, key: ConversationKey) -> Said | None:
        said = self._said.get(key)
        if said is not None:
            with contextlib.suppress(KeyError):  # large requests are rendered in a thread
                self._said.move_to_end(key)
        return said

    def answers(self, asked: str, adapter: str | None) -> list[Said]:
        """Return the remembered replies of an adapter to a prompt of this text."""
        digest = _digest(asked)
        return [
            said
            for key, said in [*self._said.items()]
            if said.asked == digest and key.adapter == adapter
        ]

    def of(self, messages: bytes) -> list[ConversationKey]:
        """Return the remembered conversations with these messages, whatever tools and adapter."""
        return [key for key in [*self._said] if key.messages == messages]


def render_prompt(
    renderer: Renderer,
    conversations: Conversations | None,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    adapter: str | None,
    limit: int | None = None,
) -> Prompt:
    """Render wire messages to a prompt, continuing a remembered conversation where possible.

    Args:
        limit: the context length, if it is known.

    Raises:
        ApiError: the template refuses the messages, or they are too long (400).
    """
    normal = renderer.normalize(messages)
    text = renderer.text(normal, tools)
    keys = _keys(renderer, normal, tools, adapter)

    # Look for the longest remembered beginning. It ends with an assistant's reply.
    ends = [i for i in range(len(normal), 0, -1) if normal[i - 1]["role"] == "assistant"]
    ids = continues = branched = None
    if conversations is None:
        branched = Branch.NO_ROLLOUT
    elif not len(conversations):
        branched = Branch.FIRST_CALL
    elif not ends:
        branched = Branch.NEW_CONVERSATION
    else:
        for tried, count in enumerate(ends):
            known, why = conversations.get(keys[count]), None
            if known is None and tried < _COMPARED_AS_TEXT:
                known, why = _written_alike(renderer, conversations, normal[:count], tools, adapter)
            ids = known and _continue(renderer, known.ids(), normal[:count], tools, text, limit)
            if known is not None and ids is not None:
                continues = known
                if branched is None and not known.is_whole_in(ids):
                    branched = Branch.REPLY_CUT
                break
            branched = branched or _reason(conversations, normal, keys[count], why)
    if ids is None:
        ids = renderer.encode(text, limit)
    opening = renderer.opening(text)
    return Prompt(ids, text, normal, keys[-1], continues, branched, opening)


def prompt_of(
    renderer: Renderer,
    ids: list[int],
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    adapter: str | None,
) -> Prompt:
    """Return the prompt of wire messages that an earlier process made, as these tokens."""
    normal = renderer.normalize(messages)
    text, keys = renderer.text(normal, tools), _keys(renderer, normal, tools, adapter)
    opening = renderer.opening(text)
    return Prompt(ids, text, normal, keys[-1], continues=None, opening=opening)


def _keys(
    renderer: Renderer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    adapter: str | None,
) -> list[ConversationKey]:
    """Return the keys of all beginnings: the i-th covers the first i messages."""
    switches = _digest(renderer.template_kwargs) if renderer.template_kwargs else b""
    keys = [ConversationKey(b"", b"" if tools is None else _digest(tools), adapter, switches)]
    for message in messages:
        keys.append(keys[-1].then(message))
    return keys


def remember_reply(
    renderer: Renderer,
    conversations: Conversations,
    prompt: Prompt,
    reply: Message,
    response_ids: Sequence[int],
    text: str,
    *,
    cut: bool,
) -> None:
    """Remember the tokens of a prompt and its reply under the messages that the agent will send.

    Args:
        reply: the wire message that the agent got.
        text: the reply's whole text, without a stop string.
        cut: whether a stop string ended it, so that the agent saw less than was sampled.
    """
    kept = list(response_ids)
    if cut:
        kept = _ids_of(renderer, kept, text)
    elif kept and renderer.is_stop(kept[-1]):
        kept.pop()  # the template writes the turn's end, see _continue
    normal = renderer.normalize([reply])[0]
    ids, asked, start = [*prompt.ids, *kept], _digest(prompt.text), len(prompt.ids)
    said = Said(ids, prompt.continues, asked, normal, response_ids, start)
    conversations.put(prompt.key.then(normal), said)


def _written_alike(
    renderer: Renderer,
    conversations: Conversations,
    beginning: list[Message],
    tools: list[dict[str, Any]] | None,
    adapter: str | None,
) -> tuple[Said | None, Branch | None]:
    """Find the remembered conversation that the template writes like ``beginning``.

    Its messages may differ in what the template ignores, as names, ids and outer whitespace may be.

    Returns:
        The conversation; else why there is none, if that is known.
    """
    *asked, reply = beginning
    why = None
    with contextlib.suppress(ApiError):  # a template may refuse what is only a beginning
        for said in conversations.answers(renderer.text(asked, tools), adapter):
            text, ours = renderer.text(beginning, tools, generate=False), said.reply
            if "tool_calls" in reply and _same_calls(ours, reply, tools):
                ours = {**ours, "tool_calls": reply["tool_calls"]}  # as the agent spells them
            if renderer.text([*asked, ours], tools, generate=False) == text:
                return said, None
            if "reasoning_content" in ours and "reasoning_content" not in reply:
                ours = {name: value for name, value in ours.items() if name != "reasoning_content"}
                if renderer.text([*asked, ours], tools, generate=False) == text:
                    why = Branch.THINKING_STRIPPED
    return None, why


def _continue(
    renderer: Renderer,
    known: list[int],
    beginning: list[Message],
    tools: list[dict[str, Any]] | None,
    whole: str,
    limit: int | None,
) -> list[int] | None:
    """Return remembered tokens, turn end and the later messages; None if history was rewritten.

    The template keeps history if it renders the beginning, reply included, the same way whether or
    not messages follow, or if it renders the text of the remembered tokens. Only the text after the
    reply is tokenized.
    """
    try:
        prefix = renderer.text(beginning, tools, generate=False)
        asked = renderer.text(beginning[:-1], tools) if len(beginning) > 1 else ""
    except ApiError:  # a template may refuse what is only a beginning
        return None
    ending = renderer.ending(prefix)
    if ending is None and renderer.begins_with_stop(whole[len(prefix) :]):
        ending = ""  # the next message begins with it, as GLM's do
    if ending is None or not (prefix.startswith(asked) and whole.startswith(prefix)):
        # Qwen3's template writes an empty thought before the last reply only.
        ending = renderer.turn_end
        prefix = renderer.decode_raw(known) + ending
        if not ending or not whole.startswith(prefix):
            return None
    return [*known, *renderer.encode(ending + whole[len(prefix) :], limit)]


def _reason(
    conversations: Conversations,
    messages: list[Message],
    key: ConversationKey,
    why: Branch | None,
) -> Branch:
    """Return why the last reply is not continued.

    Args:
        key: covers the messages up to it.
        why: what a conversation of like text tells, where none has exactly these messages.
    """
    known = conversations.of(key.messages)
    if not known:
        return why or Branch.HISTORY_EDITED
    if key.tools not in [one.tools for one in known]:
        return Branch.TOOLS_CHANGED
    if key.switches not in [one.switches for one in known]:
        return Branch.SWITCHES_CHANGED
    if key not in known:
        return Branch.MODEL_CHANGED
    thoughts = any(message.get("reasoning_content") for message in messages)
    return Branch.THINKING_STRIPPED if thoughts else Branch.TEMPLATE_REWRITES


def _ids_of(renderer: Renderer, ids: list[int], text: str) -> list[int]:
    """Return the sampled ids up to the cut; the text tokenized, if the cut is inside a token."""
    length = 0
    for count, token_id in enumerate(ids):
        if length >= len(text):
            break
        length += len(renderer.decode([token_id]))
        if length >= len(text) and renderer.decode(ids[: count + 1]) == text:
            return ids[: count + 1]
    return renderer.encode(text) if text else []


def _same_calls(ours: Message, sent: Message, tools: list[dict[str, Any]] | None) -> bool:
    """Compare calls by value. Some clients add the defaults of a tool's schema, and JavaScript
    writes 5.0 as 5."""
    defaults = dict[str, dict[str, Any]]()
    for function in (tool["function"] for tool in tools or ()):
        fields = (function.get("parameters") or {}).get("properties") or {}
        defaults[function["name"]] = {
            name: field["default"]
            for name, field in (fields.items() if isinstance(fields, dict) else ())
            if isinstance(field, dict) and "default" in field
        }

    def digest(reply: Message) -> bytes:
        calls = [call["function"] for call in reply.get("tool_calls") or ()]
        known = [
            {**call, "arguments": {**defaults.get(call["name"], {}), **call["arguments"]}}
            if isinstance(call["arguments"], dict)
            else call
            for call in calls
        ]
        return _digest(json.loads(json.dumps(known), parse_float=_number))

    return digest(ours) == digest(sent)


def _number(text: str) -> float:
    return int(number) if (number := float(text)).is_integer() else number


def _digest(value: Any, before: bytes = b"") -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits
        data = json.dumps(value, sort_keys=True).encode()
    return blake2b(before + data, digest_size=16).digest()
