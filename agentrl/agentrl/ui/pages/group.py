"""The members of a group side by side."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
