"""Trace the agent's process: root spans, attribution to attempts, and the final flush.

Outside a rollout nothing is installed and every function returns at once.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl_tracer.context import RolloutContext, chosen, current_rollout
from agentrl_tracer.instrumentation.registry import instrument_frameworks
from agentrl_tracer.propagation.http import mark_requests
from agentrl_tracer.propagation.processes import carry_into_subprocesses, carry_into_threads
from agentrl_tracer.span_router import SpanRouter

logger = logging.getLogger("agentrl")

_lock = threading.Lock()
_active: SpanRouter | None = None


def rollout_tracing() -> SpanRouter | None:
    """Return this process's tracing, created at the first call; None outside a rollout."""
    global _active
    if current_rollout() is None:
        return None
    with _lock:
        if _active is None:
            _active = SpanRouter()
            _install_patches()
        return _active


@functools.cache
def _install_patches() -> None:
    """Patch HTTP clients, threads, subprocesses and frameworks, once per process."""
    carry_into_threads()
    carry_into_subprocesses(flush)
    mark_requests(lambda: _active.agent_name() if _active is not None else None)
    instrument_frameworks(lambda: _active.parent() if _active is not None else None)


@contextmanager
def tracing(name: str, attributes: dict[str, Any] | None = None) -> Iterator[None]:
    """Run the agent under its rollout's root span, which records an exception that passes."""
    active, rollout = rollout_tracing(), current_rollout()
    if active is None or rollout is None:
        yield
        return
    with active.root_span(rollout, name, attributes):
        yield


def flush() -> bool:
    """Send the rollout's queued spans and rewards; True if all arrived or there is no rollout."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.flush(rollout)


def finish() -> bool:
    """End the rollout and send everything; False if some span or reward did not arrive."""
    rollout = current_rollout()
    return _active is None or rollout is None or _active.finish(rollout)


@dataclass(frozen=True, slots=True)
class Attribution:
    """An attempt that shares its process with others."""

    rollout: RolloutContext
    _tracing: SpanRouter

    @property
    def rewarded(self) -> bool:
        """Whether the agent has emitted a reward in this process."""
        return self._tracing.attempt(self.rollout).rewarded

    def finish(self) -> bool:
        """End the attempt and send everything; blocks, so call it in a thread from an event loop.

        Returns:
            False when some span or reward did not arrive: the attempt is incomplete.
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
    """Attribute what runs inside, threads and subprocesses included, to one attempt.

    Enter it in the attempt's own task or thread, run the agent inside, and call ``finish`` before
    the attempt ends. Calls to the gateway then carry the attempt's key, whatever base URL and key
    their client has. Set the process's ``OPENAI_BASE_URL`` to the gateway's ``/v1`` and its
    ``OPENAI_API_KEY`` to an invalid key: a call that escapes is then refused, not misattributed.

    Args:
        gateway: base URL without ``/v1``; ``AGENTRL_GATEWAY`` by default.
        environment: variables that the attempt's subprocesses get.

    Raises:
        ValueError: no gateway is known.
    """
    gateway = gateway or os.environ.get("AGENTRL_GATEWAY")
    if not gateway:
        raise ValueError("attributed: pass gateway=, or set AGENTRL_GATEWAY")
    rollout = RolloutContext(rollout_id, attempt_id, gateway.rstrip("/"), key, environment or {})
    token = chosen.set(rollout)
    try:
        active = rollout_tracing()
        assert active is not None
        active.attempt(rollout).finish_expected = True
        yield Attribution(rollout, active)
    finally:
        chosen.reset(token)
