"""Refuse requests beyond the gateway's capacity or their rollout's budget.

Does not know messages, rows or HTTP. Refusals come before rendering and recording.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import budget_exceeded, overloaded
from agentrl_proxy.requests.attempts import AttemptMemory, Spent
from agentrl_proxy.requests.auth import ask
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import AttemptRef

_LONGEST_RETRY_S = 30


class Slot:
    """A request's place among those being answered, from its acceptance to its end."""

    def __init__(self, admission: Admission, sampled: int) -> None:
        self._admission = admission
        self._sampled = sampled
        self._since = time.monotonic()
        self._taken = True
        admission.requests += 1
        admission.sampled += sampled

    def leave(self, *, answered: bool = False) -> None:
        """Give the place back. Safe to call twice."""
        if not self._taken:
            return
        self._taken = False
        admission = self._admission
        admission.requests -= 1
        admission.sampled -= self._sampled
        if answered:
            admission.usual_s += 0.1 * (time.monotonic() - self._since - admission.usual_s)


class Admission:
    """Counts the requests that are being answered, and refuses further ones."""

    def __init__(self, deps: GatewayDependencies, stats: GatewayStats) -> None:
        self._deps = deps
        self._stats = stats
        self.requests = 0
        self.sampled = 0
        self.usual_s = 1.0  # moving average of an answer's duration

    def enter(self, sampled: int) -> Slot:
        """Take a place for a request.

        Args:
            sampled: choices for our sampler; 0: a provider's model answers.

        Raises:
            ApiError: 429 with ``Retry-After``: the gateway is busy.
        """
        deps = self._deps
        if self.requests >= deps.max_concurrent:
            raise self._overloaded(f"{self.requests} requests are being answered")
        # The sampler's queue is part of these answers, so read it only if they are many.
        if sampled and self.sampled >= deps.max_queued:
            waiting: Any = deps.sampler.stats().get("waiting", 0)
            if waiting >= deps.max_queued:
                raise self._overloaded(f"{waiting} answers wait to be sampled")
        return Slot(self, sampled)

    async def within_budget(
        self, attempt: AttemptRef, memory: AttemptMemory, choices: int, prompt_tokens: int
    ) -> int | None:
        """Charge the rollout's budget; return how many tokens each choice may sample (None: all).

        Calls and prompts count when accepted, sampled tokens when sampled. So sequential requests
        never exceed the budget, and concurrent ones by at most what they sample. A provider's
        tokens count once it has reported them, and may exceed the budget by one answer.

        Raises:
            ApiError: 429 without retry: the budget is used up.
        """
        deps = self._deps
        calls, tokens = deps.max_calls_per_rollout, deps.max_tokens_per_rollout
        if calls is None and tokens is None:
            return None
        if memory.spent is None:
            # An earlier process may have answered this attempt.
            known = await ask(deps.store, deps.store.spent, attempt.attempt_id)
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
        self._stats.over_budget += 1
        return budget_exceeded(f"this rollout has {what}")

    def _overloaded(self, what: str) -> Exception:
        self._stats.overloaded += 1
        seconds = math.ceil(self.usual_s * random.uniform(0.5, 1.5))  # spread the retries out
        seconds = min(max(seconds, 1), _LONGEST_RETRY_S)
        return overloaded(f"the gateway is busy: {what}; retry in {seconds} s", seconds)
