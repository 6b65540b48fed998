"""Sessions of the Tinker server end after silence."""

from __future__ import annotations

from agentrl.tinker_server.sessions import Sessions


def test_silence_counts_from_the_last_request() -> None:
    now = 0.0
    sessions = Sessions(10.0, lambda: now)
    sessions.renew("a")
    sessions.renew("b")
    now = 9.0
    sessions.renew("b")
    now = 11.0
    assert sessions.take_silent() == ["a"]
    assert (sessions.alive("a"), sessions.alive("b"), sessions.take_silent()) == (False, True, [])
    sessions.end("b")
    now = 99.0
    assert sessions.take_silent() == []
