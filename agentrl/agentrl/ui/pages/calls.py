"""Calls by verdict, and those of `agentrl serve`."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
