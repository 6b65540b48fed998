"""Turn one choice's sampled tokens into its text, its message, and the chunks of a stream.

A token's text is held back inside a character, a stop string or a tool call's delimiter. The last
chunks are made separately, because they leave only once the answer is durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.detokenizer import Detokenizer, whole_text
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply, ToolCall, joined
from agentrl_proxy.rendering.tool_call_parser import Parser
from agentrl_proxy.requests.recording import Sampled
from agentrl_proxy.server.sse import Write


@dataclass(eq=False)
class Choice:
    """One choice of an answer that is being generated."""

    index: int  # in the response
    request: ChatRequest
    heading: chat_objects.Heading
    renderer: Renderer
    parser: Parser
    stop: tuple[str, ...]
    write: Write | None  # sends the chunks of a stream
    in_pieces: bool  # read the text while it is sampled, else when it is whole
    sampled: Sampled = field(default_factory=Sampled)
    text: str = ""
    reply: ParsedReply = field(default_factory=ParsedReply)
    withdrawn: list[ToolCall] = field(default_factory=list[ToolCall])
    """Which a stream has begun, and the reply does not have."""
    _sent: int = 0  # log-probs of the ids before this have been sent
    _held: ParsedReply = field(default_factory=ParsedReply)
    _begun: bool = False

    def __post_init__(self) -> None:
        self._tokens = Detokenizer(self.renderer.decode_raw, self.stop)

    async def push(self) -> None:
        """Read the newest token; send the text that it completes."""
        token_id = self.sampled.ids[-1]
        if self.renderer.is_hidden(token_id):
            return
        if piece := self._tokens.push(token_id):
            reply = self.parser.feed(piece)
            if self.write is not None and (delta := chat_objects.reply_delta(reply)):
                if not self._begun:
                    first = {"content": None} if "tool_calls" in delta else {}
                    delta = {"role": "assistant", **first, **delta}
                await self.write(self._chunk(delta))

    def read(self) -> None:
        """Parse the reply, whose tokens are all there."""
        renderer, parser = self.renderer, self.parser
        visible = [i for i in self.sampled.ids if not renderer.is_hidden(i)]
        self.text = whole_text(renderer.decode_raw, visible, self.stop)
        # What a stream held back goes with its last chunks.
        self._held = parser.feed(self._tokens.finish() if self.in_pieces else self.text)
        if parser.ended_at >= 0:
            self.text, self.sampled.cut_at_call = parser.text, True
        self.reply = parser.finish()
        if self.write is not None:
            self.withdrawn = parser.withdrawn

    def response(self, prompt_logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the choice as it stands in a chat completion.

        Args:
            prompt_logprobs: of the prompt's tokens; then special tokens have entries, too.
        """
        finish = self.sampled.finish
        reason = "stop" if finish is None else finish.reason
        if self.reply.tool_calls and reason == "stop":
            reason = "tool_calls"
        entries = self._entries(0, hidden=prompt_logprobs is not None)
        message = chat_objects.message(self.reply, self.withdrawn)
        said = chat_objects.choice(self.index, reason, entries, message=message)
        if finish is not None and finish.stop_string is not None:
            said["stop_reason"] = finish.stop_string  # vLLM's field
        if prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs
        if self.request.return_token_ids:
            said["token_ids"] = self.sampled.ids
        return said

    def last_chunks(self, said: dict[str, Any]) -> list[bytes]:
        """Return the chunks with what was held back and the finish reason.

        Args:
            said: the choice in the whole answer.
        """
        held, rest = self._held, self.parser.remainder(self.reply)
        content, reasoning = held.content + rest.content, held.reasoning + rest.reasoning
        pieces = joined([*held.pieces, *rest.pieces])
        delta = chat_objects.reply_delta(ParsedReply(content, reasoning, pieces=pieces))
        if not self._begun:
            delta = {"role": "assistant", "content": said["message"]["content"], **delta}
        last = chat_objects.last_chunk(self.request.dialect, self.heading, said)
        if delta or self._entries(self._sent):
            return [self._chunk(delta), last]
        return [last]

    def _chunk(self, delta: dict[str, Any]) -> bytes:
        self._begun = True
        entries = self._entries(self._sent)
        self._sent = len(self.sampled.ids)
        choice = chat_objects.choice(self.index, None, entries, delta=delta)
        return self.request.dialect.chunk(self.heading, choice)

    def _entries(self, start: int, *, hidden: bool = False) -> list[dict[str, Any]] | None:
        """Return the log-probs of the tokens from ``start`` on, if the request wants them."""
        if not self.request.logprobs:
            return None
        one = self.sampled
        parts = (one.ids[start:], one.logprobs[start:], one.tops[start:])
        return chat_objects.logprob_entries(self.renderer, *parts, hidden=hidden)
