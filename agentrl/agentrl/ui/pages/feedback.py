"""Feedback of people on rollouts and calls, tags and notes on runs."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
