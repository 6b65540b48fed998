"""Several runs side by side."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
