"""Define how much, and how slowly, a connection may send and receive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of every connection. Request heads are not limited: see docs/serving.md."""

    receive_s: float  # for a request's body to arrive
    receive_bytes: int
    """Of all bodies that are still arriving, together; further large bodies get 429."""
    stall_s: float  # that a client may leave an answer unread before it is disconnected
    grace_s: int  # for running answers after the server is told to stop
