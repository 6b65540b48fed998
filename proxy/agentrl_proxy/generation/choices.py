"""Turn one choice's sampled tokens into its text, its message and its part of the response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.generation.streaming import ChoiceReader, ChoiceStream
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.rendering.detokenizer import whole_text
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply, ToolCall
from agentrl_proxy.rendering.tool_call_parser import Parser
from agentrl_proxy.requests.recording import Sampled


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is being generated."""

    index: int  # in the response
    parser: Parser
    reader: ChoiceStream | ChoiceReader | None  # None: the text is read when it is whole
    sampled: Sampled = field(default_factory=Sampled)
    # Set by ``read``:
    text: str = ""
    reply: ParsedReply = field(default_factory=ParsedReply)
    withdrawn: list[ToolCall] = field(default_factory=list[ToolCall])

    def read(self, renderer: Renderer, stop: tuple[str, ...]) -> None:
        """Parse the reply, whose tokens are all there."""
        parser = self.parser
        visible = [i for i in self.sampled.ids if not renderer.is_hidden(i)]
        self.text = whole_text(renderer.decode_raw, visible, stop)
        if self.reader is None:
            parser.feed(self.text)
        else:
            self.reader.feed_rest()
        if parser.ended_at >= 0:
            self.text, self.sampled.cut_at_call = parser.text, True
        self.reply = parser.finish()
        if isinstance(self.reader, ChoiceStream):
            self.withdrawn = parser.withdrawn

    def response(
        self,
        renderer: Renderer,
        *,
        logprobs: bool,
        token_ids: bool,
        prompt_logprobs: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """The choice as it stands in a chat completion.

        Args:
            prompt_logprobs: of the prompt's tokens; then special tokens have entries, too.
        """
        sampled = self.sampled
        reason = "stop" if sampled.finish is None else sampled.finish.reason
        if self.reply.tool_calls and reason == "stop":
            reason = "tool_calls"
        entries = None
        if logprobs:
            entries = chat_objects.logprob_entries(
                renderer,
                sampled.ids,
                sampled.logprobs,
                sampled.tops,
                hidden=prompt_logprobs is not None,
            )
        message = chat_objects.message(self.reply, self.withdrawn)
        said = chat_objects.choice(self.index, message, reason, entries)
        if sampled.finish is not None and sampled.finish.stop_string is not None:
            said["stop_reason"] = sampled.finish.stop_string  # vLLM's field
        if prompt_logprobs is not None:
            said["prompt_logprobs"] = prompt_logprobs
        if token_ids:
            said["token_ids"] = sampled.ids
        return said
