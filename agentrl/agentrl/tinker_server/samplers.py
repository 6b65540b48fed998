"""The samplers that the SDK's clients hold on to, by id.

Knows which of them to keep: the SDK does not tell when one is no longer needed. A base model's
costs nothing and stays; one of a path is made again when it is asked for after it went; one of
weights that were saved nowhere is gone for good, so those go least recently used first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from fastapi import HTTPException

from agentrl_trainer.client import SamplingClient

_KEPT = 32
"""Loaded at a time: of those with a path, and of those without."""


class Samplers:
    def __init__(self, load: Callable[[str], SamplingClient], kept: int = _KEPT) -> None:
        self._load = load
        self._kept = kept
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, str | None]] = {}  # base model and path
        self._bases: dict[str, SamplingClient] = {}
        self._loaded: OrderedDict[str, SamplingClient] = OrderedDict()

    def add_base(self, sampler: str, client: SamplingClient) -> None:
        with self._lock:
            self._known[sampler] = (client.get_base_model(), None)
            self._bases[sampler] = client

    def add(self, sampler: str, client: SamplingClient, path: str | None) -> None:
        """``path`` None: the weights are in memory only."""
        with self._lock:
            self._known[sampler] = (client.get_base_model(), path)
            self._hold(sampler, client)

    def get(self, sampler: str) -> SamplingClient:
        with self._lock:
            _, path = self._described(sampler)
            client = self._bases.get(sampler) or self._loaded.get(sampler)
            if client is None:
                assert path is not None
                client = self._load(path)
            if sampler not in self._bases:
                self._hold(sampler, client)
            return client

    def describe(self, sampler: str) -> tuple[str, str | None]:
        """Its base model, and the path of its weights if they have one."""
        with self._lock:
            return self._described(sampler)

    def release(self, session: str) -> None:
        with self._lock:
            for sampler in [key for key in self._known if key.startswith(session)]:
                self._loaded.pop(sampler, None)
                self._bases.pop(sampler, None)
                del self._known[sampler]

    @property
    def loaded(self) -> list[str]:
        """Those that hold weights of their own, least recently used first."""
        return [*self._loaded]

    def _described(self, sampler: str) -> tuple[str, str | None]:
        if sampler not in self._known:
            raise HTTPException(
                404,
                f"there is no sampler {sampler!r}: its session has ended, or {self._kept} more "
                "have been used since, and its weights were saved nowhere",
            )
        return self._known[sampler]

    def _hold(self, sampler: str, client: SamplingClient) -> None:
        self._loaded[sampler] = client
        self._loaded.move_to_end(sampler)
        named = self._known[sampler][1] is not None
        alike = [key for key in self._loaded if (self._known[key][1] is not None) == named]
        for key in alike[: -self._kept]:
            del self._loaded[key]
            if not named:
                del self._known[key]
