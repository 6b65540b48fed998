"""The gateway that answers the agents' requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from agentrl.config.field_types import (
    Count,
    HostName,
    HttpUrl,
    Positive,
    Table,
    Whole,
    from_names,
)


class GatewaySettings(Table):
    """The gateway that answers the agents' requests."""

    allowed_hosts: Annotated[list[HostName], BeforeValidator(from_names)] = Field(
        default_factory=list[str]
    )
    """Further names by which clients may address the gateway. Its address and loopback's are known;
    give those of a proxy or a DNS alias. *.example.com is every name below it, * is any."""
    accept_any_model: bool = True
    """Answer unknown model names (gpt-4o-mini) with the adapter; else with 404."""
    leave_out_tools: bool = False
    """Leave tools that only a provider runs (web search, code interpreter) out of requests, and
    note them on the call; else such requests get 400."""
    forward_otlp: HttpUrl | None = None
    """Base URL of an OTLP backend (Jaeger, Phoenix, Langfuse) that gets every span, call and reward
    too. Headers: AGENTRL_FORWARD_OTLP_HEADERS=name=value,..."""
    max_concurrent: Count = 1024
    """Requests in progress, above which further ones get 429."""
    max_queued: Count = 1024
    """Answers waiting to be sampled, above which requests get 429."""
    receive_timeout: Positive = 60
    """Seconds a client has to send a whole request."""
    receive_mib: Annotated[int, Field(ge=32)] = 128
    """MiB of request bodies in transfer, above which large ones get 429."""
    stall_timeout: Positive = 60
    """Seconds a client may leave an answer unread before it is dropped."""
    grace: Whole = 5
    """Seconds for answers in progress at shutdown."""


class TrainGatewaySettings(GatewaySettings):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets `agentrl runner` join from other machines. Every request
    needs a rollout's key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 is any free one. Further gateways listen on the ports that follow."""
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that answer the agents, each on a core. Each has an embedded sampler of its own, or
    one of the vLLM servers; each runner asks one gateway."""


class ServeGatewaySettings(GatewaySettings):
    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs operator_key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port."""
    operator_key: Annotated[str, Field(min_length=16)] | None = None
    """API key that clients must send."""
