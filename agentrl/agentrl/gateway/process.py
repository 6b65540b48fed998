"""The gateway process: the proxy's app over a sampler, wired to the store.

Runs as ``python -m agentrl.gateway.process`` under supervision, in training and for
``agentrl serve``. Its listening socket belongs to the supervisor: while the gateway is down,
connections wait in the backlog instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import httpx

from agentrl.config.secrets import filled, variables_in
from agentrl.supervisor import SupervisedProcess, end_with_parent, python_module
from agentrl.timing import heavy_imports
from agentrl_tracer.store import Store

if TYPE_CHECKING:
    from fastapi import FastAPI

    from agentrl.samplers.embedded import EmbeddedSampler
    from agentrl.samplers.tinker import TinkerSampler
    from agentrl.samplers.vllm.sampler import VllmSampler
    from agentrl_proxy.dependencies import ProviderModel
    from agentrl_proxy.sampler import Sampler
    from agentrl_proxy.telemetry.otlp_export import OtlpExporter

log = logging.getLogger("agentrl")

_SETTINGS = "AGENTRL_GATEWAY_SETTINGS"
FORWARD_HEADERS = "AGENTRL_FORWARD_OTLP_HEADERS"
TINKER_KEY = "TINKER_API_KEY"
GATEWAY_LIMITS = {
    "max_concurrent", "max_queued", "receive_timeout", "receive_mib", "stall_timeout", "grace",
    "accept_any_model", "forward_otlp",
}  # fmt: skip
"""Settings of the [gateway] table that are fields of ``GatewaySettings``."""
_LOOK_AFTER_SAMPLER_S = 0.25
_NOT_READY = 78  # its exit code (EX_CONFIG) where it has not come as far as serving
_HOPELESS_DEATHS = 5  # in a row
_LIVED_S = 30.0  # well: then earlier deaths are forgotten
_WATCH_S = 0.1
_STOP_S = 5.0  # beyond the answers' grace: for the sampler and the last rows


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What a gateway process needs to know."""

    store: str
    model: str
    adapter: str | None  # answers every model name but those known; None: the base model does
    device: str
    dtype: str
    operator_key: str | None
    run_id: str | None
    max_tokens: int
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    temperature: float = 1.0
    models: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Other models: OtherModelConfig's fields by name. Keys stay in the environment."""
    adapters: Sequence[str] = ()  # all there are, by the names that agents ask for
    agents: dict[str, str] = field(default_factory=dict[str, str])  # role → adapter
    adapter_paths: dict[str, str] = field(default_factory=dict[str, str])
    """PEFT folders of fixed adapters, version 0, where no run makes versions."""
    max_concurrent: int = 1024
    max_queued: int = 1024
    receive_timeout: float = 60.0
    receive_mib: int = 128
    stall_timeout: float = 60.0
    grace: int = 5
    accept_any_model: bool = True
    max_calls_per_rollout: int | None = None
    max_tokens_per_rollout: int | None = None
    vllm_url: str | None = None  # sample there; None: in this process
    vllm_key_env: str | None = None
    tinker: bool = False
    """Sample on Tinker; its key stays in the environment."""
    tinker_base_url: str | None = None
    tinker_tokenizer: str | None = None
    vllm_wait: float | None = None
    """Seconds that the first process waits for a server that does not answer yet; None: no limit.
    Those that take over from it know none."""
    forward_otlp: str | None = None
    """Base URL of an OTLP backend; its headers are in AGENTRL_FORWARD_OTLP_HEADERS."""


def import_gateway() -> None:
    """Imports, in seconds, what a gateway needs: torch, transformers, the app."""
    with heavy_imports():
        for module in (
            "agentrl.samplers.embedded",
            "agentrl_proxy.app",
            "agentrl_proxy.server.uvicorn",
        ):
            importlib.import_module(module)


def run_gateway(settings: GatewaySettings, sock: socket.socket) -> None:
    """Serves on ``sock`` until told to stop.

    Raises:
        SystemExit: it cannot begin to (code 78), and has said why.
    """
    with contextlib.ExitStack() as ending:
        try:
            app = _ready_app(settings, ending)
        except Exception as error:
            _say_why(error)
            sys.exit(_NOT_READY)
        from agentrl_proxy.server.uvicorn import serve_on

        serve_on(app, sock)


def _ready_app(settings: GatewaySettings, ending: contextlib.ExitStack) -> FastAPI:
    """The app, with a sampler that runs and has its adapters."""
    import_gateway()
    import torch

    from agentrl_proxy.app import create_app
    from agentrl_proxy.dependencies import GatewayDependencies
    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_proxy.server.limits import ConnectionLimits
    from agentrl_tracer.store.writer import TraceWriter

    torch.set_num_threads(1)  # the event loop needs the other core more than the sampler does
    # The sampler's thread and the event loop hand the interpreter to each other thousands of times
    # a second; Python's default patience of 5 ms would stall every decode step.
    sys.setswitchinterval(1e-4)
    store = Store(settings.store)
    ending.callback(store.close)
    boot_id = secrets.token_hex(6)
    store.register_gateway(boot_id, settings.run_id, os.getpid())
    sampler, tokenizer = _make_sampler(settings)
    writer = TraceWriter(store, boot_id)
    ending.callback(writer.close)
    deps = GatewayDependencies(
        sampler=sampler,
        renderer=Renderer(tokenizer),
        store=store,
        writer=writer,
        boot_id=boot_id,
        models={settings.model: None} | {name: name for name in settings.adapters},
        agents=settings.agents,
        default_adapter=settings.adapter,
        provider_models={name: other_model(fields) for name, fields in settings.models.items()},
        operator_key=settings.operator_key,
        run_id=settings.run_id,
        context_length=None,  # known once the sampler runs
        defaults={"max_tokens": settings.max_tokens, "temperature": settings.temperature},
        accept_any_model=settings.accept_any_model,
        max_concurrent=settings.max_concurrent,
        max_queued=settings.max_queued,
        limits=ConnectionLimits(
            receive_s=settings.receive_timeout,
            receive_bytes=settings.receive_mib * 2**20,
            stall_s=settings.stall_timeout,
            grace_s=settings.grace,
        ),
        max_calls_per_rollout=settings.max_calls_per_rollout,
        max_tokens_per_rollout=settings.max_tokens_per_rollout,
        forward=_forward(settings),
    )

    ending.callback(sampler.stop)
    sampler.start()
    deps.context_length = sampler.context_length
    # A server comes back, and its sampler then sees to the rest.
    if settings.vllm_url is None and not settings.tinker:
        stopping = threading.Event()
        ending.callback(stopping.set)
        threading.Thread(
            target=_end_without, args=(sampler, stopping), name="sampler-watch", daemon=True
        ).start()
    for name, version, path in _adapters_to_load(settings, store):
        if not settings.tinker:
            sampler.load_now(name, version, path)
        elif why := cast("TinkerSampler", sampler).load_or_try_later(name, version, path):
            # A run that is resumed publishes it anew, from its checkpoint.
            log.error("adapter %s@%d is not loaded yet: %s", name, version, why)
    return create_app(deps)


def _say_why(error: Exception) -> None:
    """One line, where what is to be changed is outside of here; else where it happened, too."""
    from sqlalchemy.exc import SQLAlchemyError

    from agentrl.samplers.vllm.api import VllmError

    # Of SQLAlchemy's errors, the driver's own words: the rest is a link.
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    if isinstance(error, SQLAlchemyError):
        said = f"store: {said}"
    expected = isinstance(
        error, ValueError | OSError | VllmError | SQLAlchemyError | httpx.HTTPError
    )
    log.critical(
        "the gateway cannot start: %s",
        said if expected else f"{type(error).__name__}: {said}",
        exc_info=None if expected else error,
    )


def _make_sampler(
    settings: GatewaySettings,
) -> tuple[EmbeddedSampler | VllmSampler | TinkerSampler, Any]:
    """The sampler, not started yet, and the tokenizer of its model."""
    from agentrl_trainer.models.loading import load_base, load_facts

    if settings.tinker:
        from agentrl.samplers.tinker import TinkerSampler

        facts = load_facts(
            settings.tinker_tokenizer or settings.model,
            trust_remote_code=settings.trust_remote_code,
        )
        sampler = TinkerSampler(
            settings.model,
            base_url=settings.tinker_base_url,
            tokenizer=facts.tokenizer,
            eos_ids=facts.eos_ids,
            context_length=facts.context_length,
        )
        return sampler, facts.tokenizer
    if settings.vllm_url is not None:
        from agentrl.samplers.vllm.sampler import VllmSampler

        facts = load_facts(settings.model, trust_remote_code=settings.trust_remote_code)
        sampler = VllmSampler(
            settings.vllm_url,
            eos_ids=facts.eos_ids,
            context_length=facts.context_length,
            api_key=os.environ[settings.vllm_key_env] if settings.vllm_key_env else None,
            wait_s=settings.vllm_wait,
        )
        return sampler, facts.tokenizer
    from agentrl.samplers.embedded import EmbeddedSampler

    base = load_base(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        load_in_4bit=settings.load_in_4bit,
        trust_remote_code=settings.trust_remote_code,
    )
    return EmbeddedSampler(base), base.tokenizer


def _forward(settings: GatewaySettings) -> OtlpExporter | None:
    if settings.forward_otlp is None:
        return None
    from opentelemetry.util.re import parse_env_headers

    from agentrl_proxy.telemetry.otlp_export import OtlpExporter

    headers = parse_env_headers(os.environ.get(FORWARD_HEADERS, ""), liberal=True)
    return OtlpExporter(settings.forward_otlp, headers)


def _end_without(sampler: Sampler, stopping: threading.Event) -> None:
    """Ends the process when its engine has died: only a new one has a working one.

    As if asked to, so that what is under way gets its answer (503) and its row.
    """
    while not stopping.wait(_LOOK_AFTER_SAMPLER_S):
        if not sampler.healthy:
            log.critical("the sampler has died; ending, to be started again")
            os.kill(os.getpid(), signal.SIGTERM)
            return


def other_model(fields: dict[str, Any]) -> ProviderModel:
    from agentrl_proxy.dependencies import ProviderModel

    variable = fields["api_key_env"]
    key = os.environ[variable] if variable else None
    if key is None and fields["api_base"]:
        # LiteLLM would send the provider's usual key, from the environment, to whatever is there.
        key = "none"
    settings = {name: value for name, value in fields.items() if name != "api_key_env"}
    settings["params"] = filled(fields["params"], os.environ)
    return ProviderModel(**settings, api_key=key)


def variables_of(models: Mapping[str, Any]) -> list[str]:
    """The environment variables that hold secrets of other models: OtherModelConfig's fields by
    name."""
    return [
        name
        for one in models.values()
        for name in (one.get("api_key_env"), *variables_in(one.get("params")))
        if name
    ]


def _adapters_to_load(settings: GatewaySettings, store: Store) -> list[tuple[str, int, str]]:
    """(name, version, path): what this gateway must answer with before its first request."""
    if settings.adapter_paths:
        return [(name, 0, path) for name, path in settings.adapter_paths.items()]
    if settings.adapters and settings.run_id:
        return [(a.name, a.version, a.path) for a in store.latest_adapters(settings.run_id)]
    return []


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """Why the gateway has not loaded an adapter."""

    text: str
    refused: bool  # asking again would not help; else it may be there later


class Gateway:
    """A supervised gateway process, and the operator's client to it.

    It has its URL from the beginning: whoever connects before it is up, waits.
    """

    def __init__(
        self, settings: GatewaySettings, log: Path | None, listening: socket.socket
    ) -> None:
        """``log``: where what it says is appended; None: it says it where we do."""
        self._settings = settings
        self._log = log
        self._socket = listening
        host, port = listening.getsockname()[:2]
        here: str = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or host
        self.url = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
        self._process: SupervisedProcess
        key = settings.operator_key
        self._client = httpx.Client(
            base_url=self.url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(30.0),
            trust_env=False,  # a proxy has no business between us and loopback
        )

    def start(self) -> None:
        """Starts the process: as a fork of this one, if that saves the imports and is safe."""
        self._process = SupervisedProcess(
            "gateway",
            python_module("agentrl.gateway.process", str(self._socket.fileno())),
            self._log,
            env={_SETTINGS: json.dumps(asdict(self._settings))},
            # It has been there: a gateway that takes over during an outage waits for its end.
            env_again={_SETTINGS: json.dumps(asdict(replace(self._settings, vllm_wait=None)))},
            pass_fds=[self._socket.fileno()],
            fork=self._serve if _may_fork() else None,
            grace_s=self._settings.grace + _STOP_S,
            cannot_start=_NOT_READY,
        )

    def _serve(self) -> None:
        end_with_parent()
        run_gateway(self._settings, self._socket)

    @property
    def restarts(self) -> int:
        return self._process.restarts

    @property
    def deaths(self) -> int:
        return self._process.deaths

    @property
    def could_not_start(self) -> bool:
        """The first process could not begin to serve, has said why, and was the last one."""
        return self._process.could_not_start

    @property
    def pid(self) -> int:
        return self._process.pid

    def health(self, timeout_s: float = 2.0) -> dict[str, Any] | None:
        """What the gateway says of itself; None while it is not up."""
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            answer = self._client.get("/healthz", timeout=timeout_s)
            if answer.status_code == 200:
                return answer.json()
        return None

    def try_load_adapter(self, name: str, version: int, path: str) -> LoadProblem | None:
        """Asks for a hot-swap; None when done, else what went wrong."""
        try:
            answer = self._client.post(
                "/admin/adapters", json={"name": name, "version": version, "path": path}
            )
        except httpx.HTTPError as error:
            return LoadProblem(f"{type(error).__name__}: {error}", refused=False)
        if answer.status_code == 200:
            return None
        try:
            text = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = answer.text
        return LoadProblem(text, refused=answer.status_code // 100 == 4)

    def watch(self) -> NoReturn:
        """Looks after the process until interrupted.

        Raises:
            ValueError: it could not begin to serve, and has said why.
            RuntimeError: it dies again and again.
        """
        seen = forgotten = 0
        well_since = None
        while True:
            if self.could_not_start:
                raise ValueError("the gateway cannot start with these settings; see above")
            if self.deaths > seen:
                seen, well_since = self.deaths, None
            if seen - forgotten >= _HOPELESS_DEATHS:
                raise RuntimeError(
                    f"the gateway has died {seen - forgotten} times in a row, the last time with "
                    f"code {self._process.last_code}; what it said is above"
                )
            if seen > forgotten:
                if self.health() is None:
                    well_since = None
                else:
                    well_since = well_since or time.monotonic()
                    if time.monotonic() - well_since >= _LIVED_S:
                        forgotten = seen
            time.sleep(_WATCH_S)

    def log_tail(self, lines: int = 20) -> str:
        return self._process.log_tail(lines)

    def stop(self) -> None:
        self._process.stop()
        self._client.close()
        self._socket.close()


def _may_fork() -> bool:
    """Whether a fork of this process could serve: all is imported, and nothing breaks in a fork.

    Threads do not survive one (nor do the locks they hold), neither does a CUDA context, and on
    macOS system libraries forbid it.
    """
    if sys.platform != "linux" or "agentrl.samplers.embedded" not in sys.modules:
        return False
    import torch

    return threading.active_count() == 1 and not torch.cuda.device_count()


def main(argv: Sequence[str]) -> None:
    end_with_parent()
    settings = GatewaySettings(**json.loads(os.environ.pop(_SETTINGS)))
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        run_gateway(settings, socket.socket(fileno=int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
