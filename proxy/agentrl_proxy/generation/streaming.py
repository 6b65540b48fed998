"""Turn one choice's tokens into the chunks of a stream.

A token's text is held back inside a character, a stop string or a tool call's delimiter. The last
chunks are made separately, because they leave only once the answer is durable.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.detokenizer import Detokenizer
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply, joined
from agentrl_proxy.rendering.tool_call_parser import Parser
from agentrl_proxy.requests.recording import Sampled
from agentrl_proxy.server.sse import Write


class ChoiceReader:
    """Parses a choice while it is sampled, for an answer that leaves as a whole."""

    def __init__(self, renderer: Renderer, parser: Parser, stop: tuple[str, ...]) -> None:
        self._renderer = renderer
        self._parser = parser
        self._tokens = Detokenizer(renderer.decode_raw, stop)

    async def push(self, one: Sampled) -> None:
        token_id = one.ids[-1]
        piece = "" if self._renderer.is_hidden(token_id) else self._tokens.push(token_id)
        if piece:
            self._parser.feed(piece)

    def feed_rest(self) -> None:
        self._parser.feed(self._tokens.finish())


class ChoiceStream:
    """Parses a choice while it is sampled, and writes its chunks."""

    def __init__(
        self,
        request: ChatRequest,
        heading: chat_objects.Heading,
        prompt_ids: list[int],
        stop: tuple[str, ...],
        index: int,
        renderer: Renderer,
        parser: Parser,
        write: Write,
    ) -> None:
        self._heading = heading
        self._prompt_ids = prompt_ids
        self._index = index
        self._dialect = request.dialect
        self._with_logprobs = request.logprobs
        self._renderer = renderer
        self._parser = parser
        self._write = write
        self._tokens = Detokenizer(renderer.decode_raw, stop)
        self._sent = 0  # log-probs of the ids before this have been sent
        self._sent_entries = 0
        self._held = ParsedReply()
        self._begun = False

    async def push(self, one: Sampled) -> None:
        """Take the choice's newest token."""
        token_id = one.ids[-1]
        if self._renderer.is_hidden(token_id):
            return
        piece = self._tokens.push(token_id)
        delta = chat_objects.reply_delta(self._parser.feed(piece)) if piece else {}
        if not delta:
            return
        if not self._begun:
            self._begun = True
            first: dict[str, Any] = {"role": "assistant"}
            if "tool_calls" in delta:
                first["content"] = None
            delta = first | delta
        logprobs = None
        if self._with_logprobs:
            start, self._sent = self._sent, len(one.ids)
            logprobs = chat_objects.logprob_entries(
                self._renderer, one.ids[start:], one.logprobs[start:], one.tops[start:]
            )
            self._sent_entries += len(logprobs)
        await self._write(self._dialect.chunk(self._heading, self._index, delta, logprobs=logprobs))

    def feed_rest(self) -> None:
        """Parse the text that was held back; what it shows goes with the last chunks."""
        self._held = self._parser.feed(self._tokens.finish())

    def last_chunks(self, whole: ParsedReply, choice: dict[str, Any]) -> list[bytes]:
        """Return the chunks with what was held back and the finish reason."""
        rest = self._parser.remainder(whole)
        delta = chat_objects.reply_delta(
            ParsedReply(
                self._held.content + rest.content,
                self._held.reasoning + rest.reasoning,
                pieces=joined([*self._held.pieces, *rest.pieces]),
            )
        )
        if not self._begun:
            delta = {"role": "assistant", "content": choice["message"]["content"], **delta}
        logprobs = None
        if choice["logprobs"] is not None:
            logprobs = choice["logprobs"]["content"][self._sent_entries :]
        chunks: list[bytes] = []
        if delta or logprobs:
            chunks.append(self._dialect.chunk(self._heading, self._index, delta, logprobs=logprobs))
        chunks.append(
            chat_objects.last_chunk(self._dialect, self._heading, choice, self._prompt_ids)
        )
        return chunks
