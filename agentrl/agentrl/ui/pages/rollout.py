"""One rollout: its trace, conversations and tokens."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
