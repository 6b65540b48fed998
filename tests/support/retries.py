"""Requests to a gateway, and retries of them that are marked as the OpenAI SDK marks them."""

from __future__ import annotations

from typing import Any

import httpx
from gateway_client import BODY, HTTP
from scripted_sampler import Running

from agentrl_tracer.schemas import Claim

RETRY = {"x-stainless-retry-count": "1"}
CHAT = "/chat/completions"


def post(
    gateway: Running, path: str, body: dict[str, Any], claim: Claim | None = None, **more: Any
) -> httpx.Response:
    claim = claim or gateway.claims[0]
    headers = {"authorization": f"Bearer {claim.key}", **more.pop("headers", {})}
    return HTTP.post(gateway.base_url(claim) + path, json=body, headers=headers, **more)


def said(gateway: Running, **headers: str) -> str:
    """The id of what a chat request is answered with."""
    return post(gateway, CHAT, BODY, headers=headers).raise_for_status().json()["id"]
