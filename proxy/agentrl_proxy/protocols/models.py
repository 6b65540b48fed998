"""Write models as OpenAI's and Anthropic's clients list them, and check what loads an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl_proxy.protocols.fields import NAME, Object, integer

ADAPTER = Object(  # the store's integers
    ["name", "version", "path"], name=NAME, version=integer(0, 2**31 - 1), path=NAME
)
_UNKNOWN = "1970-01-01T00:00:00Z"  # Anthropic's own stand-in for an unknown release date


def model_card(name: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN}
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def model_list(names: Sequence[str], *, anthropic: bool) -> dict[str, Any]:
    """List all models. There are too few for pages."""
    cards = [model_card(name, anthropic=anthropic) for name in names]
    if not anthropic:
        return {"object": "list", "data": cards}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": cards, "has_more": False, "first_id": first, "last_id": last}
