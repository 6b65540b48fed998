"""The instant mock as a LiteLLM custom provider, for LiteLLM's and Agent-lightning's proxies.

Its streamed chunks carry no log-probabilities: LiteLLM's GenericStreamingChunk has no place for
them.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from litellm import Choices, CustomLLM, Message, ModelResponse, Usage
from litellm.types.utils import ChoiceLogprobs, GenericStreamingChunk

sys.path.insert(0, str(Path(__file__).parents[1]))
import answer

ANSWER = answer.load()
LOGPROBS = ChoiceLogprobs(content=ANSWER.entries)  # type: ignore[arg-type]


class Instant(CustomLLM):
    async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        params = kwargs.get("optional_params") or {}
        choice = Choices(
            finish_reason="length",
            index=0,
            message=Message(role="assistant", content=ANSWER.text),
            logprobs=LOGPROBS if params.get("logprobs") else None,
        )
        response = ModelResponse(choices=[choice], model=answer.MODEL)
        response.usage = Usage(**ANSWER.usage)  # type: ignore[attr-defined]
        return response

    async def astreaming(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, **kwargs: Any
    ) -> AsyncIterator[GenericStreamingChunk]:
        for token in ANSWER.tokens:
            yield _chunk(token)
        yield _chunk("", finished=True)


def _chunk(text: str, *, finished: bool = False) -> GenericStreamingChunk:
    return {
        "text": text,
        "is_finished": finished,
        "finish_reason": "length" if finished else "",
        "index": 0,
        "tool_use": None,
        "usage": ANSWER.usage if finished else None,  # type: ignore[typeddict-item]
    }


instant = Instant()
