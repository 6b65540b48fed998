"""Which adapter versions a vLLM server has: load, replace, unload.

Each load gets a LoRA name that is never used again. vLLM keys adapters by name and its prefix cache
by (name, path), so no load can answer for an older one, even where a resumed run writes another
adapter to the same path. A request keeps the load that it started with, so the newest few loads of
an adapter stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentrl.samplers.vllm.api import VllmClient, require_loaded
from agentrl_proxy.sampler import RefusedError

log = logging.getLogger("agentrl")

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_KEPT = 3
"""Replaced loads of an adapter that stay: publications that a request may outlast."""
_LOAD_S = 25.0
"""Time limit of a load, less than what the publishing run waits."""
FILES_S = 90.0
"""How long an adapter's files may stay out of the server's sight: the attribute caches of network
file systems last up to 60 s."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One adapter version as the server has it."""

    lora: str
    """Its name in the server."""
    version: int
    path: str

    def body(self) -> dict[str, str | bool]:
        named: dict[str, str | bool] = {"lora_name": self.lora, "lora_path": self.path}
        # The server may see a folder that this process does not, or reports what is wrong with it.
        with contextlib.suppress(OSError, ValueError):
            if adapts_experts(self.path):
                named["is_3d_lora_weight"] = True
        return named


class VllmAdapters:
    """The adapters of one server. ``load`` and ``restore`` block, so they are for threads."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.current: dict[str, LoadedAdapter] = {}
        """The load of each adapter that answers now; replaced as a whole."""
        self._older: dict[str, list[str]] = {}
        """LoRA names that ``current`` replaced, by adapter."""
        self._stale: list[str] = []
        """LoRA names that the server may have and no request uses."""
        self.swaps = 0

    def load(self, name: str, version: int, path: str) -> None:
        """Load a version beside the one that answers now, then make it the current one.

        Raises:
            RefusedError: the server does not take it (``invalid_parameter``), does not see its
                files (``files_not_found``), or is lost (``stopped``).
        """
        try:
            load = self._loaded(name, version, path)
        except httpx.TransportError as error:
            raise self._client.unavailable(error) from error
        older = self._replace(name, load)
        self._stale += older[:-_KEPT]
        del older[:-_KEPT]
        self.swaps += 1
        while self._stale:
            self._unload(self._stale.pop())

    def expect(self, name: str, version: int, path: str) -> None:
        """Let ``restore`` load this version when the server, which is lost, is back."""
        now = self.current.get(name)
        if now is None or (now.version, now.path) != (version, path):
            self._replace(name, LoadedAdapter(_new_name(name, version), version, path))

    def _replace(self, name: str, load: LoadedAdapter) -> list[str]:
        """Make a load the current one; return the LoRA names of those that it followed."""
        with self._lock:
            older = self._older.setdefault(name, [])
            if name in self.current:
                older.append(self.current[name].lora)
            self.current = self.current | {name: load}
        return older

    def restore(self, name: str, load: LoadedAdapter) -> str:
        """Load a version again under a new name, unless a newer one was published meanwhile.

        Returns the new name.
        """
        self._unload(load.lora)  # another process behind this URL may have it
        again = self._loaded(name, load.version, load.path)
        with self._lock:
            if newest := self.current[name] is load:
                self.current = self.current | {name: again}
        if not newest:
            self._unload(again.lora)
        return again.lora

    def _loaded(self, name: str, version: int, path: str) -> LoadedAdapter:
        load = LoadedAdapter(_new_name(name, version), version, path)
        try:
            answer = self._client.blocking.post(_LOAD, json=load.body(), timeout=_LOAD_S)
            require_loaded(answer, path)
        except (httpx.TransportError, RefusedError):
            self._stale.append(load.lora)  # a load that timed out may succeed all the same
            raise
        return load

    def _unload(self, lora: str) -> None:
        try:
            answer = self._client.blocking.post(_UNLOAD, json={"lora_name": lora})
            if answer.status_code != 404:  # a restarted server does not have it
                answer.raise_for_status()
        except httpx.HTTPError as error:  # it only costs memory
            log.warning("vLLM did not unload %s: %s", lora, error)

    def unload_all(self) -> None:
        older = [lora for loras in self._older.values() for lora in loras]
        with contextlib.suppress(httpx.HTTPError):
            for lora in [*self._stale, *older, *(load.lora for load in self.current.values())]:
                self._client.blocking.post(_UNLOAD, json={"lora_name": lora}, timeout=2.0)


def _new_name(name: str, version: int) -> str:
    """Return a LoRA name that no load has had."""
    return f"{name}@v{version}-{secrets.token_hex(4)}"


def adapter_rank(folder: str | Path) -> int:
    """Return the LoRA rank of a PEFT folder."""
    return int(_read_config(folder)["r"])


def adapts_experts(folder: str | Path) -> bool:
    """Whether a PEFT folder holds the LoRA of all of a layer's experts in one tensor.

    vLLM also knows another format, and must be told at its start and with each adapter.
    """
    targets = _read_config(folder).get("target_parameters") or ()
    return any(name.startswith("experts.") for name in targets)


def _read_config(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
