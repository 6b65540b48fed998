"""Token continuity: a conversation that goes on keeps the exact tokens it has had so far.

Knows messages, rendered text and token ids of earlier calls of one attempt. Does not know
samplers, the store or HTTP.

A reply goes back to the model as the tokens it sampled, not as a re-tokenisation of their text.
So the turns of a rollout become one row of training data, and the sampler's KV cache hits. Where
the agent or the template changed history (an edit, a summary, thinking stripped), the messages
are rendered anew and a new branch starts.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from agentrl_proxy.rendering import Message, Renderer

MAX_CONVERSATIONS = 256  # per attempt; least recently used go first
MAX_TOKENS = 2_000_000  # per attempt, four bytes each


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the sampler gets, and what is needed to remember its reply."""

    ids: list[int]
    messages: list[Message]  # normalised
    key: bytes  # of tools, adapter and messages
    continued: bool  # exact tokens of an earlier call, plus a delta


class Conversations:
    """What one attempt's conversations were, token for token. Bounded."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, array[int]] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def put(self, key: bytes, ids: Sequence[int]) -> None:
        old = self._tokens.pop(key, None)
        self._total += len(ids) - (0 if old is None else len(old))
        self._tokens[key] = array("i", ids)
        while self._tokens and (len(self._tokens) > MAX_CONVERSATIONS or self._total > MAX_TOKENS):
            _, dropped = self._tokens.popitem(last=False)
            self._total -= len(dropped)

    def get(self, key: bytes) -> array[int] | None:
        ids = self._tokens.get(key)
        if ids is not None:
            self._tokens.move_to_end(key)
        return ids


def render_prompt(
    renderer: Renderer,
    conversations: Conversations | None,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    adapter: str | None,
) -> Prompt:
    """Prompt ids of wire messages, continuing a remembered conversation where possible."""
    normal = renderer.normalise(messages)
    text = renderer.text(normal, tools)
    keys = _keys(normal, tools, adapter)
    if conversations is not None and len(conversations):
        # The longest remembered beginning. It ends with an assistant's reply.
        for count in range(len(normal), 0, -1):
            if normal[count - 1]["role"] != "assistant":
                continue
            known = conversations.get(keys[count])
            if known is None:
                continue
            ids = _continue(renderer, known, normal[:count], tools, text)
            if ids is not None:
                return Prompt(ids, normal, keys[-1], continued=True)
    return Prompt(renderer.encode(text), normal, keys[-1], continued=False)


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
    """Keep the tokens of a prompt and its reply, under what the agent will send back.

    Args:
        reply: the wire message that the agent got.
        text: the reply's whole text, as cut before a stop string.
        cut: whether a stop string ended it. Then the agent saw less than was sampled.
    """
    kept = list(response_ids)
    if cut:
        kept = _ids_of(renderer, kept, text)
    elif kept and renderer.is_stop(kept[-1]):
        kept.pop()  # the turn's end is written by the template, see _continue
    normal = renderer.normalise([reply])[0]
    conversations.put(_extend(prompt.key, normal), [*prompt.ids, *kept])


def _continue(
    renderer: Renderer,
    known: array[int],
    beginning: list[Message],
    tools: list[dict[str, Any]] | None,
    whole: str,
) -> list[int] | None:
    """Remembered tokens + turn end + what was added since; None if the template rewrote history.

    The template keeps history if it writes the beginning, reply included, the same way whether or
    not something follows. Only the text after the reply is tokenised.
    """
    ending = renderer.turn_end
    if not ending:
        return None
    prefix = renderer.text(beginning, tools, generate=False)
    asked = renderer.text(beginning[:-1], tools) if len(beginning) > 1 else ""
    if not (prefix.startswith(asked) and prefix.endswith(ending) and whole.startswith(prefix)):
        return None
    return [*known, *renderer.encode(ending + whole[len(prefix) :])]


def _ids_of(renderer: Renderer, ids: list[int], text: str) -> list[int]:
    """The sampled ids up to where the text was cut; the text's own ids if that is inside one."""
    length = 0
    for count, token_id in enumerate(ids):
        if length >= len(text):
            break
        length += len(renderer.decode([token_id]))
        if length >= len(text) and renderer.decode(ids[: count + 1]) == text:
            return ids[: count + 1]
    return renderer.encode(text) if text else []


def _keys(
    messages: Sequence[Message], tools: list[dict[str, Any]] | None, adapter: str | None
) -> list[bytes]:
    """A hash of every beginning of the conversation: ``keys[i]`` covers the first i messages."""
    key = _digest(b"", _canonical([tools, adapter]))
    keys = [key]
    for message in messages:
        key = _extend(key, message)
        keys.append(key)
    return keys


def _extend(key: bytes, message: Message) -> bytes:
    calls = message.get("tool_calls")
    if calls:
        # By value, and without ids: frameworks make up their own.
        message = {**message, "tool_calls": [call["function"] for call in calls]}
    return _digest(key, _canonical(message))


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits
        return json.dumps(value, sort_keys=True).encode()


def _digest(key: bytes, data: bytes) -> bytes:
    return blake2b(key + data, digest_size=16).digest()
