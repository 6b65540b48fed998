"""The one answer that every contestant's mock gives, and what a client is told of it.

Knows the answer file that run.py writes. Needs the standard library only: servers in venvs of their
own import it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = "BENCHMARK_ANSWER"
MODEL = "policy"


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    tokens: list[str]
    logprobs: list[float]
    prompt_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The log-probabilities in OpenAI's format."""
        return [
            {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
            for t, p in zip(self.tokens, self.logprobs, strict=True)
        ]

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + len(self.ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "total_tokens": total,
        }


def load() -> Answer:
    with open(os.environ[ENVIRONMENT]) as file:
        return Answer(**json.load(file))
