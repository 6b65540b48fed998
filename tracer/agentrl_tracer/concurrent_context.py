"""Several rollouts in one process, as asyncio tasks or threads: whose is what.

The contract of whoever runs them: enter ``attributed`` in the task or thread of one attempt, run
the agent inside, and call ``finish`` (which blocks) before the attempt ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl_tracer.context import RolloutContext, chosen
from agentrl_tracer.provider import RolloutTracing, rollout_tracing


@dataclass(frozen=True, slots=True)
class Attribution:
    """An attempt, and what has come of it."""

    rollout: RolloutContext
    _tracing: RolloutTracing

    @property
    def rewarded(self) -> bool:
        """Whether the agent has emitted a reward in this process."""
        return self._tracing.rewarded(self.rollout)

    def finish(self) -> bool:
        """Sends every span and reward; blocks, so an event loop calls it in a thread.

        Returns:
            False when some did not arrive: the attempt is incomplete.
        """
        return self._tracing.finish(self.rollout)


@contextmanager
def attributed(
    key: str,
    rollout_id: str,
    attempt_id: str,
    *,
    gateway: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Attribution]:
    """What runs inside (tasks, threads, executors, subprocesses too) belongs to this attempt.

    Its calls to the gateway carry its key, whatever base URL and key their client was made with;
    its spans and rewards go to it. The process's own ``OPENAI_BASE_URL`` should be the gateway's
    ``/v1``, and its ``OPENAI_API_KEY`` nobody's: what escapes is then refused, not misattributed.

    Args:
        gateway: base URL without ``/v1``; ``AGENTRL_GATEWAY`` by default.
        environment: variables that its subprocesses get.

    Raises:
        ValueError: no gateway is known.
    """
    gateway = gateway or os.environ.get("AGENTRL_GATEWAY")
    if not gateway:
        raise ValueError("attributed: pass gateway=, or set AGENTRL_GATEWAY")
    rollout = RolloutContext(rollout_id, attempt_id, gateway.rstrip("/"), key, environment or {})
    token = chosen.set(rollout)
    try:
        tracing = rollout_tracing()
        assert tracing is not None
        tracing.attend(rollout)
        yield Attribution(rollout, tracing)
    finally:
        chosen.reset(token)
