"""Whether there is room: for one more request in this gateway, and in its rollout's budget.

Knows counts and durations. Does not know messages, rows or HTTP. Refusals come before anything
is rendered or recorded.
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

    def leave(self, *, answered: bool = False) -> None:
        """Gives the place back; safe to call twice."""
        if self._taken:
            self._taken = False
            seconds = time.monotonic() - self._since if answered else None
            self._admission.left(self._sampled, seconds)


class Admission:
    """Counts what is being answered, and refuses what would be too much."""

    def __init__(self, deps: GatewayDependencies, stats: GatewayStats) -> None:
        self._deps = deps
        self._stats = stats
        self._requests = 0
        self._sampled = 0
        self._usual_s = 1.0  # how long an answer takes, lately

    def enter(self, sampled: int) -> Slot:
        """A place for a request.

        Args:
            sampled: how many choices our sampler is asked for; 0: somebody else's model answers.

        Raises:
            ApiError: 429 with ``Retry-After``: there is none now.
        """
        deps = self._deps
        if self._requests >= deps.max_concurrent:
            raise self._overloaded(f"{self._requests} requests are being answered")
        # What waits in the sampler is part of what is being answered here: where that is little,
        # the sampler need not be asked.
        if sampled and self._sampled >= deps.max_queued:
            waiting: Any = deps.sampler.stats().get("waiting", 0)
            if waiting >= deps.max_queued:
                raise self._overloaded(f"{waiting} answers wait to be sampled")
        self._requests += 1
        self._sampled += sampled
        return Slot(self, sampled)

    def left(self, sampled: int, seconds: float | None) -> None:
        self._requests -= 1
        self._sampled -= sampled
        if seconds is not None:
            self._usual_s += 0.1 * (seconds - self._usual_s)

    async def within_budget(
        self, attempt: AttemptRef, memory: AttemptMemory, choices: int, prompt_tokens: int
    ) -> int | None:
        """How many tokens each choice may still sample; None: no limit.

        Calls count when accepted, prompts too, sampled tokens when they were sampled. So an agent
        that asks one thing after another never exceeds its budget; one with several requests
        under way exceeds it by at most what those sample. Somebody else's model is not held back:
        what it used counts once it has said so, and may exceed the budget by one answer.

        Raises:
            ApiError: 429, not to be retried: the budget is used up.
        """
        deps = self._deps
        calls, tokens = deps.max_calls_per_rollout, deps.max_tokens_per_rollout
        if calls is None and tokens is None:
            return None
        if memory.spent is None:
            # First seen by this process: an earlier one may have answered it.
            known = await ask(deps.store, deps.store.spent, attempt.attempt_id)
            if memory.spent is None:  # nobody else asked meanwhile
                memory.spent = Spent(*known)
        spent = memory.spent
        room = None
        if calls is not None and spent.calls + choices > calls:
            self._stats.over_budget += 1
            raise budget_exceeded(
                f"this rollout has made {spent.calls} calls of the {calls} it may make "
                f"(max_calls_per_rollout), and asks for {choices} more"
            )
        if tokens is not None:
            room = (tokens - spent.tokens - prompt_tokens) // choices
            if room < 1:
                self._stats.over_budget += 1
                raise budget_exceeded(
                    f"this rollout has used {spent.tokens} tokens of the {tokens} it may use "
                    f"(max_tokens_per_rollout), and this prompt has {prompt_tokens}"
                )
        spent.calls += choices
        spent.tokens += prompt_tokens
        return room

    def _overloaded(self, what: str) -> Exception:
        self._stats.overloaded += 1
        # Spread out, lest all who were refused come back at the same moment.
        seconds = math.ceil(self._usual_s * random.uniform(0.5, 1.5))
        seconds = min(max(seconds, 1), _LONGEST_RETRY_S)
        return overloaded(f"the gateway is busy: {what}; come back in {seconds} s", seconds)
