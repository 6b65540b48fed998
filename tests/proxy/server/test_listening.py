"""Sockets of servers: who may reach them, and their addresses."""

from __future__ import annotations

import pytest

from agentrl_proxy.server.listening import bind, is_loopback, url_of


def test_binding() -> None:
    with pytest.raises(ValueError, match="operator key"):
        bind("0.0.0.0", 0, operator_key=None)
    with bind("0.0.0.0", 0, operator_key="k") as bound:
        assert bound.getsockname()[1] > 0
        with pytest.raises(OSError, match="in use"):
            bind("0.0.0.0", bound.getsockname()[1], operator_key="k")
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("example.org")


def test_an_address_of_ipv6_binds_and_has_brackets() -> None:
    with bind("::", 0, operator_key="k") as bound:
        assert url_of(bound) == f"http://[::]:{bound.getsockname()[1]}"
