"""Models as OpenAI's and Anthropic's clients list them.

Knows both APIs' objects. Does not know which models there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NEVER = "1970-01-01T00:00:00Z"  # Anthropic's stand-in, too, for a release date nobody knows


def model_card(name: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": _NEVER}
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def model_list(names: Sequence[str], *, anthropic: bool) -> dict[str, Any]:
    """All of them: there are never so many that a client would want pages."""
    cards = [model_card(name, anthropic=anthropic) for name in names]
    if not anthropic:
        return {"object": "list", "data": cards}
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    return {"data": cards, "has_more": False, "first_id": None, "last_id": None, **ends}
