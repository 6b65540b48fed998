"""Refuse requests beyond the gateway's capacity or their rollout's budget.

Does not know messages, rows or HTTP. Refusals come before rendering and recording.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, GatewayStats
from agentrl_proxy.errors import DO_NOT_RETRY, ApiError, overloaded
from agentrl_proxy.requests.attempts import AttemptMemory, Spent
from agentrl_proxy.requests.auth import ask

_LONGEST_RETRY_S = 30


class Admission:
    """Counts the requests that are being answered, and refuses further ones."""

    def __init__(self, deps: GatewayDependencies, stats: GatewayStats) -> None:
        self.deps = deps
        self.stats = stats
        self._prompts = 0  # of the requests that are being answered
        self._sampled = 0  # their choices that our sampler gives
        self._usual_s = 1.0  # moving average of an answer's duration

    def enter(self, prompts: int, sampled: int) -> float:
        """Take a request's places, from its acceptance to its end. ``leave`` must follow.

        Args:
            sampled: choices for our sampler; 0: a provider's model answers.

        Returns:
            The time, for ``leave``.

        Raises:
            ApiError: 429 with ``Retry-After``: the gateway is busy.
        """
        deps = self.deps
        if self._prompts + prompts > deps.max_concurrent:
            raise self._overloaded(f"{self._prompts} requests are being answered")
        # The sampler's queue is part of these answers, so read it only if they are many.
        if sampled and self._sampled >= deps.max_queued:
            waiting: Any = deps.sampler.stats().get("waiting", 0)
            if waiting >= deps.max_queued:
                raise self._overloaded(f"{waiting} answers wait to be sampled")
        self._prompts += prompts
        self._sampled += sampled
        return time.monotonic()

    def leave(self, prompts: int, sampled: int, since: float, *, answered: bool) -> None:
        self._prompts -= prompts
        self._sampled -= sampled
        if answered:
            self._usual_s += 0.1 * (time.monotonic() - since - self._usual_s)

    async def within_budget(
        self, memory: AttemptMemory, choices: int, prompt_tokens: int
    ) -> int | None:
        """Charge the rollout's budget; return how many tokens each choice may sample (None: all).

        Calls and prompts count when accepted, sampled tokens when sampled. So sequential requests
        never exceed the budget, and concurrent ones by at most what they sample. A provider's
        tokens count once it has reported them, and may exceed the budget by one answer.

        Raises:
            ApiError: 429 without retry: the budget is used up.
        """
        deps = self.deps
        calls, tokens = deps.max_calls_per_rollout, deps.max_tokens_per_rollout
        if calls is None and tokens is None:
            return None
        if memory.spent is None:
            # An earlier process may have answered this attempt.
            known = await ask(deps.store, deps.store.spent, memory.attempt.attempt_id)
            if memory.spent is None:  # no other request read it meanwhile
                memory.spent = Spent(*known)
        spent = memory.spent
        room = None
        if calls is not None and spent.calls + choices > calls:
            raise self._over_budget(
                f"made {spent.calls} of its {calls} calls (max_calls_per_rollout); "
                f"this request needs {choices} more"
            )
        if tokens is not None:
            room = (tokens - spent.tokens - prompt_tokens) // choices
            if room < 1:
                raise self._over_budget(
                    f"used {spent.tokens} of its {tokens} tokens (max_tokens_per_rollout); "
                    f"this prompt has {prompt_tokens}"
                )
        spent.calls += choices
        spent.tokens += prompt_tokens
        return room

    def _over_budget(self, what: str) -> Exception:
        self.stats.over_budget += 1
        kind, code = "rate_limit_error", "rollout_budget_exceeded"
        message = f"this rollout has {what}"
        return ApiError(429, message, kind=kind, code=code, headers=DO_NOT_RETRY)

    def _overloaded(self, what: str) -> Exception:
        self.stats.overloaded += 1
        seconds = math.ceil(self._usual_s * random.uniform(0.5, 1.5))  # spread the retries out
        seconds = min(max(seconds, 1), _LONGEST_RETRY_S)
        return overloaded(f"the gateway is busy: {what}; retry in {seconds} s", seconds)
