"""The supervisor's side of a gateway process: start it, watch it, publish adapters, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import httpx

from agentrl.config.commands import ModelCommand, TrainConfig
from agentrl.config.secrets import secret_variables
from agentrl.gateway.process import CANNOT_START, GatewayPlan, run_gateway
from agentrl.process_privacy import environment_without
from agentrl.supervisor import SupervisedProcess, end_with_parent
from agentrl.timing import Waiting, heavy_imports
from agentrl_proxy.server.listening import http_url
from agentrl_tracer.schemas import Json

_HOPELESS_DEATHS = 5  # in a row, after which ``watch`` gives up
_LIVED_S = 30.0  # of health, after which earlier deaths are forgotten
_WATCH_S = 0.1
_READY_TIMEOUT_S = 600.0  # a large model takes minutes to load
_POLL_S = 0.03
_STOP_S = 5.0  # to stop the sampler and write the last rows, beyond the grace for answers


class Trouble(NamedTuple):
    """Why a gateway has not loaded an adapter."""

    why: str
    refusal: Literal["", "unfit", "files_not_found"] = ""
    """The sampler does not take the adapter as it is, or does not see its files."""
    deferred: bool = False
    """It has no sampler now, and loads the adapter when it has one again."""


class GatewayHandle(SupervisedProcess):
    """A supervised gateway process, and the operator's client to it.

    Its URL is valid from the beginning: connections wait until the process is up.
    """

    def __init__(self, plan: GatewayPlan, log: Path | None, listening: socket.socket) -> None:
        super().__init__(
            f"gateway {plan.number}" if plan.gateways > 1 else "gateway",
            [sys.executable, "-m", "agentrl.gateway.process", str(listening.fileno())],
            log,
            environment_without(secret_variables(plan)),
            stdin=handed_over(plan),
            pass_fds=[listening.fileno()],
            grace_s=plan.gateway.grace + _STOP_S,
            cannot_start=CANNOT_START,
        )
        self._plan = plan
        self._socket = listening
        host, port = listening.getsockname()[:2]
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or host
        self.url = http_url(reached, port)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if (key := plan.operator_key) else {},
            timeout=30.0,
            trust_env=False,  # no proxy between us and loopback
        )

    @property
    def url_for_others(self) -> str:
        """Its URL as other machines reach it; this machine's own where it listens on loopback."""
        host, port = self._socket.getsockname()[:2]
        if host not in ("0.0.0.0", "::"):
            return self.url
        family, far = (socket.AF_INET6, "2001:db8::1") if host == "::" else (
            socket.AF_INET, "192.0.2.1"
        )  # fmt: skip
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as route:  # sends nothing
                route.connect((far, 9))
                address = str(route.getsockname()[0])
        except OSError:  # no network
            address = socket.gethostname()
        return http_url(address, port)

    def start(self) -> None:
        """Start the process, and again whenever it ends by itself."""
        self.launch()
        self.supervise()

    def launch(self) -> None:
        """Start the process, as a fork of this one where that is safe and saves the imports."""
        self.spawn(self._serve if _may_fork() else None)
        # A process that takes over during an outage of vLLM waits for its end, however long.
        self.stdin = handed_over(self._plan.model_copy(update={"vllm_wait": None}))

    def _serve(self) -> None:
        end_with_parent()
        run_gateway(self._plan, self._socket)

    def health(self) -> dict[str, Any] | None:
        """Return the answer of /healthz; None while the gateway is not up."""
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            return self._client.get("/healthz", timeout=2.0).raise_for_status().json()
        return None

    @property
    def lacks_sampler(self) -> str:
        """What to say where its vLLM server did not come up in time."""
        return (
            f"sampler.vllm.url: no vLLM server is ready at {self._plan.vllm_url} after "
            f"{self._plan.vllm_wait:g} s (sampler.vllm.wait)."
        )

    def _lacks_sampler(self) -> bool:
        """Whether the gateway is up and its sampler is not."""
        with contextlib.suppress(httpx.HTTPError):
            return self._client.get("/healthz", timeout=2.0).status_code == 503
        return False

    def wait_ready(self, on_wait: Callable[[str], object]) -> dict[str, Any]:
        """Wait until the process is up, and return its health; {} where it has no sampler yet, and
        others of its run may have one.

        Args:
            on_wait: receives, now and then, what is starting.

        Raises:
            RuntimeError: it cannot start, keeps dying or takes too long; quotes the end of the log.
        """
        waiting = Waiting(on_wait)
        limit = _READY_TIMEOUT_S + (self._plan.vllm_wait or 0)
        while (health := self.health()) is None:
            if self._plan.may_lack_vllm and self._lacks_sampler():
                on_wait(f"{self.lacks_sampler} The {self.name} takes it when it comes up.")
                return {}
            killed = (self.last_code or 0) < 0  # from outside, which starting again may outlive
            tries = 10 if killed else 3
            if self.could_not_start or self.deaths >= tries or waiting.seconds > limit:
                # Its reason comes last, after warnings and retries of what it loads.
                said, begins, why = self.log_tail().rpartition("the gateway cannot start: ")
                raise RuntimeError(
                    f"{begins}{why}\nits log: {self.log}"
                    if begins
                    else f"the {self.name} does not start (exit code {self.last_code}); the end of "
                    f"{self.log}:\n{said}{why}"
                )
            waiting.still(
                lambda: f"the {self.name} is starting ({waiting.seconds:.0f} s) {self.log_tail(1)}"
            )
            time.sleep(_POLL_S)
        return health

    def ask(self, path: str, body: Json, headers: Mapping[str, str], timeout_s: float) -> None:
        """Send a model a request, for its record.

        Raises:
            RuntimeError: the gateway refuses it; the message says why.
        """
        answer = self._client.post(path, json=body, headers=headers, timeout=timeout_s)
        if not answer.is_success:
            raise RuntimeError(_error_of(answer)["message"])

    def try_load_adapter(self, name: str, version: int, path: str) -> Trouble | None:
        """Have the gateway answer with an adapter version from now on; None: it does."""
        adapter = {"name": name, "version": version, "path": path}
        try:
            answer = self._client.post("/admin/adapters", json=adapter)
        except httpx.HTTPError as error:
            # One that is starting loads what the store has, once it has a sampler.
            return Trouble(f"{type(error).__name__}: {error}", deferred=self.health() is None)
        if answer.is_success:
            return None
        error = _error_of(answer)
        code, why = error.get("code"), error["message"]
        if code == "adapter_files_not_found":
            return Trouble(why, "files_not_found")
        return Trouble(why, "unfit" if answer.is_client_error else "", code == "adapter_deferred")

    def drop_prefixes(self) -> None:
        """Free memory of the sampler that no call needs until the next version; best effort."""
        with contextlib.suppress(httpx.HTTPError):
            self._client.post("/admin/drop-prefixes", json={})

    def watch(self) -> NoReturn:
        """Wait until interrupted.

        Raises:
            ValueError: the gateway could not start, and has logged why.
            RuntimeError: it dies again and again.
        """
        forgotten, unwell_at = 0, time.monotonic()
        while not self.could_not_start:
            deaths = self.deaths - forgotten
            if deaths >= _HOPELESS_DEATHS:
                raise RuntimeError(
                    f"the gateway has died {deaths} times in a row, the last time with code "
                    f"{self.last_code}; its output is above"
                )
            if deaths:
                if self.health() is None:
                    unwell_at = time.monotonic()
                elif time.monotonic() - unwell_at >= _LIVED_S:
                    forgotten += deaths
            time.sleep(_WATCH_S)
        raise ValueError("the gateway cannot start with these settings; see above")

    def stop(self) -> None:
        super().stop()
        self._client.close()
        self._socket.close()


def _error_of(answer: httpx.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = answer.json()["error"]
        return {**error, "message": str(error["message"])}
    return {"message": f"the gateway answered {answer.status_code}: {answer.text[:500]}"}


def _may_fork() -> bool:
    """Whether a fork of this process could serve: everything is imported and survives a fork.

    Threads do not survive one (nor do the locks they hold), nor a CUDA context, and on macOS
    system libraries forbid it.
    """
    if sys.platform != "linux" or "agentrl.samplers.embedded" not in sys.modules:
        return False
    import torch

    return threading.active_count() == 1 and not torch.cuda.device_count()


def fetch_model(config: ModelCommand) -> None:
    """Fetch a command's model, if it is a built-in one, and refuse one that does not exist.

    The caller's terminal shows it at once; the gateway would write it into its log.

    Raises:
        ModelError: names the field and the fix.
    """
    with heavy_imports():  # fetching needs torch
        from agentrl_trainer.models.sources import require_model

        name = config.model.name
        if isinstance(config, TrainConfig) and config.run.backend == "tinker":
            name = config.tinker.tokenizer or name
        require_model(name)


def handed_over(plan: GatewayPlan) -> bytes:
    """Return what an executed gateway reads first: its plan, and the variables that hold keys.

    Its environment could be read by agents of this user until it hides its memory.
    """
    keys = {name: os.environ[name] for name in secret_variables(plan) if name in os.environ}
    return json.dumps({"plan": plan.model_dump(mode="json"), "environment": keys}).encode() + b"\n"
