"""Ask a recorded call again of another model: an older adapter version, the base model, a judge.

A gateway of a run is started for its first replay, and ends after idle minutes. A training's own
gateway is not asked: it answers rollouts only, and must not load old versions. Replays are
recorded in ``runs/NAME/replays.db``: the run's store belongs to its own gateways, and another one
would take calls that they have open for lost. They belong to no rollout, so nothing trains on
them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
from pydantic import Field, ValidationError

from agentrl.config.commands import ModelCommand
from agentrl.config.errors import ConfigError
from agentrl.config.field_types import Count, Table
from agentrl.config.setting_names import recorded
from agentrl.config.settings.models import ModelSettings, OtherModelSettings
from agentrl.config.settings.sampler import SamplerSettings, TinkerSettings
from agentrl.gateway.handle import GatewayHandle
from agentrl.gateway.process import GatewayPlan
from agentrl.history.rollout.conversation import path_of
from agentrl.runs.folder import RunFolder
from agentrl_proxy.server.listening import bind
from agentrl_tracer.conventions import AGENT_HEADER, REQUEST_HEADER
from agentrl_tracer.schemas import Call, Json
from agentrl_tracer.store import Store
from agentrl_tracer.store import tables as t
from agentrl_trainer.names import TINY_MODEL

AGENT = "replay"
"""Marks a replay's call, as its agent. Its ``params["request_id"]`` is the id of the call that it
repeats."""
_STORE, _MOST_SHOWN = "replays.db", 20
_IDLE_S = 600.0
_LONGEST_S = 900.0  # of an answer
_ID = 64  # characters of a request's id that a gateway records
_SAMPLING = SamplerSettings.model_fields.keys() - {"kind", "vllm"}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_AGAIN = ("stream", "stream_options", "n", "seed", "previous_response_id", *_LIMITS)
"""The recorded ``input`` has what a previous response stood for."""


@dataclass(frozen=True)
class Target:
    """Who can answer. ``path`` is the folder of an adapter ``version``, or its address on Tinker;
    ``is_own`` is False for a model that another server answers."""

    model: str
    version: int | None = None
    path: str = ""
    is_own: bool = True

    @property
    def name(self) -> str:
        return self.model if self.version is None else f"{self.model}@{self.version}"


class Sampling(Table):
    """How a call is asked again."""

    temperature: Annotated[float, Field(ge=0, le=2)]
    """Sampling temperature, from 0 to 2."""
    max_tokens: Count
    """Longest answer in tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the answer; empty for any."""


@dataclass(frozen=True)
class Replay:
    """A replay under way, or the last one."""

    call_id: str
    target: Target
    answer: Future[None]

    @property
    def error(self) -> str:
        error = self.answer.exception() if self.answer.done() else None
        return "" if error is None else str(error) or type(error).__name__


def targets(folder: RunFolder) -> dict[str, Target]:
    """Return who can answer in a run's place, by name: kept adapter versions, newest first; the
    base model; and the models of its configuration whose keys are in the environment."""
    config = folder.read_config()
    found = [
        Target(path.parent.name, int(path.name[1:]), _place(path))
        for path in sorted(folder.adapters.glob("*/v*"), reverse=True)
        if path.name[1:].isdigit()
    ]
    found.append(Target(recorded(config, "model.name", TINY_MODEL)))
    found += [Target(name, is_own=False) for name in other_models(config)]
    return {one.name: one for one in found}


def replays_of(folder: RunFolder, call_id: str) -> list[Call]:
    """Return the newest replays of a call, newest first."""
    path, c = folder.root / _STORE, t.calls.c
    if not path.is_file():
        return []
    of_call = sa.func.json_extract(c.params, "$.request_id") == call_id[:_ID]
    query = sa.select(c.id).where(of_call).order_by(c.started_at.desc()).limit(_MOST_SHOWN)
    with contextlib.closing(Store(str(path), read_only=True)) as store:
        calls = [store.call(row["id"]) for row in store.db.fetch(query)]
    return [call for call in calls if call is not None]


class Replayer:
    """Makes replays, one after the other. ``close`` ends its gateway."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._worker = ThreadPoolExecutor(1, "replay")
        self._timer = threading.Timer(0, lambda: None)
        self._gateway: GatewayHandle | None = None
        self._folder: Path | None = None  # whose run the gateway is of
        self.last: Replay | None = None

    @property
    def is_warm(self) -> bool:
        return self._gateway is not None

    def start(self, folder: RunFolder, call: Call, target: Target, how: Sampling) -> Replay:
        """Begin to ask a call again, and return at once.

        Raises:
            ConfigError: the call cannot be asked of the target.
        """
        path, body = _request(call, target, how)
        answer = self._worker.submit(self._replay, folder, call.id, target, path, body)
        self.last = Replay(call.id, target, answer)
        return self.last

    def close(self) -> None:
        self._timer.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._stop()

    def _stop(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.stop()

    def _replay(
        self, folder: RunFolder, call_id: str, target: Target, path: str, body: Json
    ) -> None:
        self._timer.cancel()
        try:
            gateway = self._ready(folder)
            if target.version is not None:
                trouble = gateway.try_load_adapter(target.model, target.version, target.path)
                if trouble is not None:
                    raise RuntimeError(f"{target.name} does not load: {trouble.why}")
            gateway.ask(path, body, {AGENT_HEADER: AGENT, REQUEST_HEADER: call_id}, _LONGEST_S)
        finally:
            self._timer = threading.Timer(self._idle_s, self._rest)
            self._timer.daemon = True
            self._timer.start()

    def _rest(self) -> None:
        with contextlib.suppress(RuntimeError):  # the worker has ended, and the gateway
            self._worker.submit(self._stop)

    def _ready(self, folder: RunFolder) -> GatewayHandle:
        """Return the gateway of a run, once it answers."""
        if self._folder != folder.root:
            self._stop()
        gateway = self._gateway
        if gateway is None:
            plan = _plan(folder)
            listening = bind("127.0.0.1", 0, operator_key=plan.operator_key)
            folder.logs.mkdir(mode=0o700, exist_ok=True)  # which a run elsewhere has not
            gateway = GatewayHandle(plan, folder.logs / "replay-gateway.log", listening)
            gateway.start()
            self._gateway, self._folder = gateway, folder.root
        try:
            gateway.wait_ready(lambda _: None)
        except RuntimeError:
            self._stop()
            raise
        return gateway


@contextlib.contextmanager
def gateway_of(folder: RunFolder, store: Store, run_id: str) -> Iterator[tuple[str, GatewayPlan]]:
    """Serve the models of a run that this process has locked; yields the URL and the plan.

    Its adapters answer with their newest versions. The store of the run records the calls.

    Raises:
        RuntimeError: the gateway does not start.
    """
    plan = _plan(folder).model_copy(update={"store": store.url, "run_id": run_id})
    listening = bind("127.0.0.1", 0, operator_key=plan.operator_key)
    gateway = GatewayHandle(plan, folder.logs / "rescore-gateway.log", listening)
    try:
        gateway.start()
        gateway.wait_ready(lambda _: None)
        yield gateway.url, plan
    finally:
        gateway.stop()


def _plan(folder: RunFolder) -> GatewayPlan:
    """Plan a gateway with a run's model, sampled by the embedded sampler or on Tinker."""
    config = folder.read_config()
    model, sampler = recorded(config, "model", {}), recorded(config, "sampler", {})
    command = ModelCommand.model_validate(
        {
            "model": {k: v for k, v in model.items() if k in ModelSettings.model_fields},
            "sampler": {k: v for k, v in sampler.items() if k in _SAMPLING},
            "models": other_models(config),
        }
    )
    name = command.model.name
    start = folder.started_in.read_text() if folder.started_in.is_file() else ""
    if start and (there := Path(start, name)).is_dir():  # it was relative to there
        command.model.name = str(there)
    on_tinker = recorded(config, "run.backend") == "tinker"
    return GatewayPlan.of(
        command,
        vllm_url=None,
        tinker=TinkerSettings.model_validate(config.get("tinker") or {}) if on_tinker else None,
        store=str(folder.root / _STORE),
        operator_key=f"sk-operator-{secrets.token_urlsafe(24)}",
        adapters=tuple(path.name for path in folder.adapters.glob("*") if path.is_dir()),
        base_names=(name,),
    )


def other_models(config: Json) -> dict[str, OtherModelSettings]:
    """Return the other models of a run whose keys are in the environment."""
    found: dict[str, OtherModelSettings] = {}
    for name, settings in (config.get("models") or {}).items():
        with contextlib.suppress(ValidationError):
            found[name] = OtherModelSettings.model_validate(settings)
    for one in found.values():
        one.fallbacks = [name for name in one.fallbacks if name in found]
    return found


def _place(adapter: Path) -> str:
    pointer = adapter / "tinker.json"
    return json.loads(pointer.read_text())["path"] if pointer.is_file() else str(adapter)


def _request(call: Call, target: Target, how: Sampling) -> tuple[str, Json]:
    """Return the path and the body that ask a call again.

    Our own models get the call's prompt token for token. A provider's model gets its messages.

    Raises:
        ConfigError: the call has no such prompt.
    """
    asked = {"model": target.model, "temperature": how.temperature}
    seed = {} if how.seed is None else {"seed": how.seed}
    if target.is_own and call.prompt_ids:
        prompt = {"prompt": call.prompt_ids, "max_tokens": how.max_tokens, "logprobs": 0}
        return "/v1/completions", asked | prompt | seed
    path = path_of(call)
    if path == "completions":
        raise ConfigError(
            f"model: {target.name} cannot be asked: the call has no messages. Choose one of the "
            "run's own models"
        )
    kept = {k: v for k, v in (call.request or {}).items() if k not in _NOT_AGAIN}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    seed = seed if path == "chat/completions" else {}
    return f"/v1/{path}", kept | asked | {limit: how.max_tokens} | seed
