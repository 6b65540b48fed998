"""Which adapter versions a vLLM server has: load, replace, unload.

Each load gets a LoRA name that is never used again. vLLM keys adapters by name and its prefix cache
by (name, path), so no load can answer for an older one, even where a resumed run writes another
adapter to the same path. A request keeps the load that it started with; a load is dropped when it
was replaced and no request uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentrl.samplers.vllm.api import require_loaded
from agentrl.samplers.vllm.client import VllmClient
from agentrl_proxy.sampler import RefusedError

log = logging.getLogger("agentrl")

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_PATIENCE_S = 4.0
"""How long a publication waits for a server that is down."""
_LOAD_S = 25.0
"""Time limit of a load; with the patience less than what the publishing run waits."""
_POLL_S = 0.25


@dataclass(slots=True)
class LoadedAdapter:
    """One adapter version as the server has it."""

    lora: str
    """Its name in the server."""
    version: int
    path: str
    adapts_experts: bool = False
    users: int = 0
    replaced: bool = False

    def body(self) -> dict[str, str | bool]:
        named: dict[str, str | bool] = {"lora_name": self.lora, "lora_path": self.path}
        return named | {"is_3d_lora_weight": True} if self.adapts_experts else named


class VllmAdapters:
    """The adapters of one server. ``load_now`` and ``restore`` are for threads, the rest is for the
    event loop."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._loads: dict[str, LoadedAdapter] = {}
        self._names: set[str] = set()
        """LoRA names that the server may have; unloaded in the end."""
        self._replacing = threading.Lock()
        self.swaps = 0
        self.unloading: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> Mapping[str, int]:
        return {name: load.version for name, load in self._loads.items()}

    def use(self, name: str) -> LoadedAdapter:
        """Return the current load and count a user, until ``release``."""
        load = self._loads.get(name)
        if load is None:
            raise RefusedError("unknown_adapter", f"no adapter {name!r} is loaded")
        load.users += 1
        return load

    def release(self, load: LoadedAdapter) -> None:
        load.users -= 1
        self._drop_if_unused(load)

    async def load(self, name: str, version: int, path: str) -> None:
        """Load a version beside the one that answers now, then make it the current one.

        Raises:
            RefusedError: the server does not take it (``invalid_parameter``), or is lost
                (``stopped``).
        """
        await self._until_healthy()
        load = _new_load(name, version, path)
        self._names.add(load.lora)  # first: a load that times out may succeed all the same
        try:
            require_loaded(await self._client.post(_LOAD, load.body(), limit_s=_LOAD_S), path)
        except BaseException as error:
            self._begin_unload(load.lora)
            if isinstance(error, httpx.TransportError):
                raise self._client.unavailable(error) from error
            raise
        with self._replacing:
            before = self._loads.get(name)
            self._loads[name] = load
        self.swaps += 1
        if before is not None:
            before.replaced = True
            self._drop_if_unused(before)

    async def _until_healthy(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._client.healthy:
            if time.monotonic() > deadline:
                raise self._client.unavailable()
            await asyncio.sleep(_POLL_S)

    def _drop_if_unused(self, load: LoadedAdapter) -> None:
        if load.replaced and not load.users:
            self._begin_unload(load.lora)

    def _begin_unload(self, lora: str) -> None:
        task = asyncio.get_running_loop().create_task(self._unload(lora))
        self.unloading.add(task)
        task.add_done_callback(self.unloading.discard)

    async def _unload(self, lora: str) -> None:
        try:
            answer = await self._client.post(_UNLOAD, {"lora_name": lora}, limit_s=_LOAD_S)
            if answer.status_code != 404:  # a restarted server does not have it
                answer.raise_for_status()
            self._names.discard(lora)
        except (httpx.HTTPError, RefusedError) as error:
            # Its name is never requested again, so it only costs memory.
            log.warning("vLLM did not unload %s: %s", lora, error)

    # ---- for threads

    def load_now(self, server: httpx.Client, name: str, version: int, path: str) -> None:
        load = _new_load(name, version, path)
        self._load_on(server, load)
        self._loads[name] = load
        self.swaps += 1

    def missing(self, listed: set[str]) -> dict[str, LoadedAdapter]:
        """Return the current loads whose LoRA names the server does not list."""
        return {name: load for name, load in self._loads.items() if load.lora not in listed}

    def is_current(self, name: str, load: LoadedAdapter) -> bool:
        return self._loads.get(name) is load

    def restore(self, server: httpx.Client, name: str, load: LoadedAdapter) -> None:
        """Load a version again under a new name, unless a newer one was published meanwhile."""
        self._unload_on(server, load.lora)  # another process behind this URL may have it
        again = _new_load(name, load.version, load.path)
        self._load_on(server, again)
        with self._replacing:
            if current := self.is_current(name, load):
                self._loads[name] = again
        if not current:
            self._unload_on(server, again.lora)

    def unload_all(self, server: httpx.Client) -> None:
        with contextlib.suppress(httpx.HTTPError):
            for lora in list(self._names):
                server.post(_UNLOAD, json={"lora_name": lora}, timeout=2.0)

    def _load_on(self, server: httpx.Client, load: LoadedAdapter) -> None:
        self._names.add(load.lora)
        require_loaded(server.post(_LOAD, json=load.body()), load.path)

    def _unload_on(self, server: httpx.Client, lora: str) -> None:
        server.post(_UNLOAD, json={"lora_name": lora})
        self._names.discard(lora)


def _new_load(name: str, version: int, path: str) -> LoadedAdapter:
    try:
        experts = adapts_experts(path)
    except (OSError, ValueError):  # the server may see the folder, or reports what is wrong
        experts = False
    return LoadedAdapter(f"{name}@v{version}-{secrets.token_hex(4)}", version, path, experts)


def adapter_rank(folder: str | Path) -> int:
    """Return the LoRA rank of a PEFT folder."""
    return int(_read_config(folder)["r"])


def adapts_experts(folder: str | Path) -> bool:
    """Whether a PEFT folder holds the LoRA of all of a layer's experts in one tensor.

    vLLM also knows another format, and must be told at its start and with each adapter.
    """
    return any(
        name.startswith("experts.") for name in _read_config(folder).get("target_parameters") or ()
    )


def _read_config(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
