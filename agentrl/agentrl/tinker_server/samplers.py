"""The sampling clients that the SDK holds by id, of which the server keeps the most recently used.

The SDK does not tell when it drops one. A base model's costs nothing and stays; one of saved
weights is made again when it is used after it was dropped; one of weights that were never saved is
gone for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import HTTPException

from agentrl_trainer.client import SamplingClient

_KEPT = 32
"""Loaded at a time: of those with a path, and of those without."""


@dataclass(slots=True)
class _Sampler:
    base_model: str
    path: str | None  # of saved weights
    is_base: bool
    client: SamplingClient | None


class Samplers:
    """``load`` makes the client of a path again."""

    def __init__(self, load: Callable[[str], SamplingClient], kept: int = _KEPT) -> None:
        self._load = load
        self._kept = kept
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Sampler] = OrderedDict()  # least recently used first

    def add(
        self, sampler: str, client: SamplingClient, path: str | None, *, is_base: bool = False
    ) -> None:
        """Add a client; ``path`` None without ``is_base`` is of weights in memory only."""
        with self._lock:
            self._known[sampler] = _Sampler(client.get_base_model(), path, is_base, client)
            self._drop_unused()

    def get(self, sampler: str) -> SamplingClient:
        with self._lock:
            found = self._find(sampler)
            self._known.move_to_end(sampler)
            if found.client is None:
                assert found.path is not None
                found.client = self._load(found.path)
                self._drop_unused()
            return found.client

    def describe(self, sampler: str) -> tuple[str, str | None]:
        """Return the base model, and the path of its weights if they were saved."""
        with self._lock:
            found = self._find(sampler)
            return found.base_model, found.path

    def release(self, session: str) -> None:
        """Drop the samplers whose ids start with ``session``."""
        with self._lock:
            for sampler in [key for key in self._known if key.startswith(session)]:
                del self._known[sampler]

    @property
    def loaded(self) -> list[str]:
        """Ids of samplers with weights of their own in memory, least recently used first."""
        return [key for key, one in self._known.items() if one.client and not one.is_base]

    def _find(self, sampler: str) -> _Sampler:
        if sampler not in self._known:
            raise HTTPException(
                404,
                f"there is no sampler {sampler!r}: its session has ended, or {self._kept} more "
                "have been used since, and its weights were saved nowhere",
            )
        return self._known[sampler]

    def _drop_unused(self) -> None:
        for saved in (True, False):
            alike = [key for key in self.loaded if (self._known[key].path is not None) == saved]
            for key in alike[: -self._kept]:
                self._known[key].client = None
                if not saved:
                    del self._known[key]
