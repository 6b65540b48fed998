"""Ask a recorded call again of another model: an older adapter version, the base model, a judge.

A gateway of a run is started for its first replay, and ends after idle minutes. A training's own
gateway is not asked: it answers rollouts only, and must not load old versions. Replays are
recorded in ``runs/NAME/replays.db``: the run's store belongs to its one gateway, and a second one
would take calls that the first has open for lost. They belong to no rollout, so nothing trains on
them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.config.settings import (
    GatewaySettings,
    ModelSettings,
    OtherModelSettings,
    SamplerSettings,
    TinkerSettings,
)
from agentrl.gateway.handle import GatewayHandle
from agentrl.gateway.process import GatewayPlan
from agentrl.runs.folder import RunFolder
from agentrl_proxy.server.listening import bind
from agentrl_tracer.conventions import AGENT_HEADER, REQUEST_HEADER
from agentrl_tracer.schemas import Call, Json

AGENT = "replay"
"""Marks a replay's call, as its agent. Its ``params["request_id"]`` is the id of the call that it
repeats."""
_IDLE_S = 600.0
_LONGEST_S = 900.0  # for a start, and for an answer
_POLL_S = 0.1


@dataclass(frozen=True)
class Target:
    """Who can answer. ``path`` is the folder of an adapter version, or its address on Tinker."""

    model: str
    version: int | None = None
    path: str = ""
    other: OtherModelSettings | None = None

    @property
    def name(self) -> str:
        return self.model if self.version is None else f"{self.model}@{self.version}"


@dataclass(frozen=True)
class Sampling:
    temperature: float
    max_tokens: int
    seed: int | None = None


@dataclass
class Replay:
    """A replay under way, or the last one."""

    run: str
    call_id: str
    target: Target
    state: str = "the gateway starts"
    """What is going on; ``done`` or ``failed`` in the end."""
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")


def targets(folder: RunFolder) -> dict[str, Target]:
    """Return who can answer in a run's place, by name: kept adapter versions, newest first; the
    base model; and the models of its configuration whose keys are in the environment."""
    config = folder.read_config()
    found: list[Target] = []
    for path in sorted(folder.adapters.glob("*/v*"), reverse=True):
        if path.name[1:].isdigit():
            found.append(Target(path.parent.name, int(path.name[1:]), _place(path)))
    found.append(Target(_tables(folder, config)["model"].name))
    for name, settings in (config.get("models") or {}).items():
        with contextlib.suppress(ValidationError):  # its key is not in this environment
            found.append(Target(name, other=OtherModelSettings.model_validate(settings)))
    return {one.name: one for one in found}


class Replayer:
    """Makes replays, one at a time. ``close`` ends its gateway."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._gateway: GatewayHandle | None = None
        self._folder: Path | None = None  # whose run the gateway is of
        self._key = ""
        self._timer: threading.Timer | None = None
        self.last: Replay | None = None

    @property
    def is_warm(self) -> bool:
        return self._gateway is not None

    def start(self, folder: RunFolder, call: Call, target: Target, how: Sampling) -> Replay:
        """Begin to ask a call again, and return at once.

        Raises:
            ConfigError: another replay is under way, or the call cannot be asked of the target.
        """
        path, body = _request(call, target, how)
        with self._lock:
            if self.last is not None and not self.last.is_over:
                raise ConfigError("replay: another one is under way; wait for its answer")
            self._rest()
            replay = self.last = Replay(folder.name, call.id, target)
        work = (folder, replay, path, body)
        threading.Thread(target=self._work, args=work, name="replay", daemon=True).start()
        return replay

    def close(self) -> None:
        self._rest()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.stop()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _work(self, folder: RunFolder, replay: Replay, path: str, body: Json) -> None:
        ended = "failed"
        try:
            gateway = self._ready(folder)
            if replay.target.version is not None:
                replay.state = f"{replay.target.name} is loaded"
                loaded = (replay.target.model, replay.target.version, replay.target.path)
                if problem := gateway.try_load_adapter(*loaded):
                    raise RuntimeError(f"{replay.target.name} does not load: {problem[0]}")
            replay.state = "it is sampled"
            _ask(f"{gateway.url}/v1/{path}", self._key, replay.call_id, body)
            ended = "done"
        except Exception as error:
            replay.error = str(error) or type(error).__name__
        with self._lock:
            self._timer = threading.Timer(self._idle_s, self.close)
            self._timer.daemon = True
            self._timer.start()
            replay.state = ended

    def _ready(self, folder: RunFolder) -> GatewayHandle:
        """Return the gateway of a run, which answers.

        Raises:
            RuntimeError: it does not start; quotes its log.
        """
        if self._gateway is not None and self._folder != folder.root:
            self.close()
        if self._gateway is None:
            self._key = f"sk-operator-{secrets.token_urlsafe(24)}"
            listening = bind("127.0.0.1", 0, operator_key=self._key)
            log = folder.logs / "replay-gateway.log"
            self._gateway = GatewayHandle(_plan(folder, self._key), log, listening)
            self._folder = folder.root
            self._gateway.start()
        gateway, until = self._gateway, time.monotonic() + _LONGEST_S
        while gateway.health() is None:
            if gateway.could_not_start or gateway.deaths > 2 or time.monotonic() > until:
                said = gateway.log_tail(5)
                self.close()
                raise RuntimeError(f"the gateway does not start: {said}")
            time.sleep(_POLL_S)
        return gateway


def _plan(folder: RunFolder, key: str) -> GatewayPlan:
    known = targets(folder).values()
    others = {one.model: one.other for one in known if one.other is not None}
    for other in others.values():
        other.fallbacks = [name for name in other.fallbacks if name in others]
    config = folder.read_config()
    on_tinker = recorded(config, "run.backend") == "tinker"
    return GatewayPlan(
        **_tables(folder, config),
        gateway=GatewaySettings(),  # its own: nothing is forwarded
        models=others,
        tinker=_table(TinkerSettings, config.get("tinker")) if on_tinker else None,
        store=str(folder.root / "replays.db"),
        operator_key=key,
        adapters=tuple({one.model: None for one in known if one.version is not None}),
    )


def _tables(folder: RunFolder, config: Json) -> Json:
    """Return the tables of model and sampler; vLLM's is left out: the embedded sampler answers."""
    model = _table(ModelSettings, config.get("model"))
    start = folder.started_in.read_text() if folder.started_in.is_file() else ""
    if start and (there := Path(start, model.name)).is_dir():  # it was relative to there
        model.name = str(there)
    sampler = {k: v for k, v in (config.get("sampler") or {}).items() if k not in ("kind", "vllm")}
    return {"model": model, "sampler": _table(SamplerSettings, sampler)}


def _table(kind: Any, found: Mapping[str, Any] | None) -> Any:
    return kind.model_validate({k: v for k, v in (found or {}).items() if k in kind.model_fields})


def _place(adapter: Path) -> str:
    pointer = adapter / "tinker.json"
    return json.loads(pointer.read_text())["path"] if pointer.is_file() else str(adapter)


def _request(call: Call, target: Target, how: Sampling) -> tuple[str, Json]:
    """Return the path below ``/v1`` and the body that ask a call again.

    Our own models get the call's prompt token for token. A provider's model gets its messages.

    Raises:
        ConfigError: the call has no such prompt.
    """
    asked: Json = {"model": target.model, "temperature": how.temperature}
    seed = {} if how.seed is None else {"seed": how.seed}
    if target.other is None and call.prompt_ids:
        prompt = {"prompt": call.prompt_ids, "max_tokens": how.max_tokens, "logprobs": 0}
        return "completions", asked | prompt | seed
    request = call.request or {}
    if not {"messages", "input"} & request.keys():
        raise ConfigError(
            f"model: {target.name} cannot be asked: the call has no messages. Choose one of the "
            "run's own models"
        )
    unwanted = ("stream", "stream_options", "n", "seed", "max_tokens", "max_completion_tokens")
    kept = {name: value for name, value in request.items() if name not in unwanted}
    if "input" in request:
        return "responses", kept | asked | {"max_output_tokens": how.max_tokens}
    path = "messages" if call.response_id.startswith("msg_") else "chat/completions"
    seed = {} if path == "messages" else seed
    return path, kept | asked | {"max_tokens": how.max_tokens} | seed


def _ask(url: str, key: str, call_id: str, body: Json) -> None:
    """Post a request; the gateway records its answer.

    Raises:
        RuntimeError: it was refused, for a reason that the message gives.
    """
    headers = {"authorization": f"Bearer {key}", AGENT_HEADER: AGENT, REQUEST_HEADER: call_id}
    with httpx.Client(timeout=_LONGEST_S, trust_env=False) as client:
        answer = client.post(url, json=body, headers=headers)
    if not answer.is_success:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            raise RuntimeError(answer.json()["error"]["message"])
        raise RuntimeError(f"the gateway answered {answer.status_code}: {answer.text[:500]}")
