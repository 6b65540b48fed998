"""A run in progress: store, gateway and runners, together for as long as they are needed."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl.config.commands import EvalConfig, RunConfig, TrainConfig
from agentrl.gateway.process import (
    FORWARD_HEADERS,
    GATEWAY_LIMITS,
    TINKER_KEY,
    Gateway,
    GatewaySettings,
    import_gateway,
    variables_of,
)
from agentrl.runner import PoolHandle, RunnerConfig, start_pool
from agentrl.runs.folder import RunFolder
from agentrl.samplers.vllm.server import planned_server
from agentrl.timing import Waiting
from agentrl.training.upkeep import Upkeep
from agentrl_tracer.schemas import (
    AttemptState,
    Json,
    NewRollout,
    Outcomes,
    Policies,
    Purpose,
    Rollout,
    RolloutState,
)
from agentrl_tracer.store import Store

if TYPE_CHECKING:
    from agentrl.runner.ray import RayPool

_POLL_S = 0.03
_LONGEST_POLL_S = 1.0  # of what is published, for a sampler that is away
_REFUSED_S = 3.0  # until we believe it: a dying vLLM refuses too, and a shared folder may lag
_READY_TIMEOUT_S = 600.0  # a large model takes minutes to load
_VLLM_READY_TIMEOUT_S = 1800.0  # it loads, compiles and warms up
_HOPELESS_RESTARTS = 5  # restarts in a row without anything getting done


class RunError(RuntimeError):
    """The run cannot go on; the message says why and where to look."""


class Session:
    """Starts the gateway and the runners; stops them on the way out, whatever happened.

    A folder that holds a run already is gone on with: what its processes left unfinished is
    cancelled. It is locked for as long as ``folder`` lives.

    Args:
        kind: ``train``, ``eval`` or ``run``, for the list of runs.
        base_only: answer with the base model, whatever the agent asks for.
        adapter_paths: fixed adapters to answer with, in place of the run's own versions.
        asks_for: the model that the agent is told to ask for; by default the one run here.
        imports_torch: this process needs torch too. It imports it first, once for both: a gateway
            that is forked then is there 2 s sooner, and shares that memory.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig | EvalConfig | RunConfig,
        kind: str,
        *,
        base_only: bool = False,
        adapter_paths: Mapping[str, Path] | None = None,
        asks_for: str | None = None,
        imports_torch: bool = False,
    ) -> None:
        folder.lock()
        self.folder = folder
        self.config = config
        shared = config.run.store if isinstance(config, TrainConfig) else None
        self.store = Store(shared or str(folder.store))
        self.run_id = self._register(kind)
        self._vllm = planned_server(
            config,
            folder.logs / "vllm.log",
            max_rank=config.learning.rank if isinstance(config, TrainConfig) else None,
            adapters=(adapter_paths or {}).values(),
        )
        # Where another model is evaluated, no name may mean the base model by default.
        evaluated = isinstance(config, EvalConfig) and config.model.answered_by is not None
        only_known: dict[str, Any] = {"accept_any_model": False} if evaluated else {}
        self._settings = GatewaySettings(
            store=self.store.url,
            model=config.model.name,
            adapter=None if base_only else config.sole_adapter,
            adapters=() if base_only else tuple(config.trained),
            agents={} if base_only else config.adapter_of_agent,
            device=config.model.device,
            dtype=config.model.dtype,
            load_in_4bit=config.model.load_in_4bit,
            trust_remote_code=config.model.trust_remote_code,
            operator_key=f"sk-operator-{secrets.token_urlsafe(24)}",
            run_id=self.run_id,
            max_tokens=config.sampler.max_tokens,
            temperature=config.sampler.temperature,
            models=_other_models(config),
            adapter_paths={name: str(path) for name, path in (adapter_paths or {}).items()},
            **config.gateway.model_dump(include=GATEWAY_LIMITS) | only_known,
            max_calls_per_rollout=config.rollouts.max_calls_per_rollout,
            max_tokens_per_rollout=config.rollouts.max_tokens_per_rollout,
            vllm_url=self._vllm.url if self._vllm else config.sampler.vllm.url,
            vllm_key_env=config.sampler.vllm.key_env,
            **_tinker_settings(config),
            vllm_wait=None if self._vllm else config.sampler.vllm.wait,
        )
        self._asks_for = asks_for
        self._imports_torch = imports_torch
        self.why_not_lean: str | None = None
        """Why the embedded sampler decodes by the model's own modules; known once it is ready."""
        self.started = time.perf_counter()
        self.gateway: Gateway
        self.pool: PoolHandle | RayPool
        self.upkeep: Upkeep

    def _register(self, kind: str) -> str:
        """The run's id: made now, or the one the folder already has, which goes by the
        configuration of now from here on."""
        config = self.config
        policies = Policies(
            on_error=config.rollouts.on_error,
            on_timeout=config.rollouts.on_timeout,
            on_missing_reward=config.rollouts.on_missing_reward,
            max_attempts=config.rollouts.max_attempts,
        )
        settings = config.model_dump(mode="json")
        if self.folder.config.exists():
            run_id = self.folder.run_id.read_text().strip()
            self.store.end_run(run_id, "running")
            self.store.cancel(run_id, "the run was resumed")
            self.store.change_run(run_id, settings, policies)
        else:
            run_id = self.store.create_run(self.folder.name, kind, settings, policies)
            self.folder.run_id.write_text(run_id)
        # Last: a folder with a configuration is one that can be resumed.
        self.folder.write_json(self.folder.config, settings)
        return run_id

    def __enter__(self) -> Self:
        config = self.config
        where = (
            (config.gateway.host, config.gateway.port)
            if isinstance(config, TrainConfig)
            else ("127.0.0.1", 0)
        )
        try:
            listening = socket.create_server(where, backlog=1024)
            self.gateway = Gateway(self._settings, self.folder.logs / "gateway.log", listening)
        except OSError as error:
            raise RunError(f"gateway.host/gateway.port: cannot listen there: {error}") from error
        self.pool = self._start_runners(
            RunnerConfig(
                store=self.store.url,
                gateway=self.gateway.url,
                run_id=self.run_id,
                agent=config.agent.entrypoint,
                model=self._asks_for or self._model_name(),
                runners=config.rollouts.runners,
                timeout_s=config.rollouts.timeout,
                lease_s=config.rollouts.lease,
                logs=str(self.folder.logs),
                concurrency=config.rollouts.concurrency,
                python=config.agent.python,
                rollouts_per_process=config.rollouts.rollouts_per_process,
                withheld=tuple(
                    name
                    for name in (
                        FORWARD_HEADERS,
                        TINKER_KEY,
                        config.sampler.vllm.key_env,
                        *variables_of(self._settings.models),
                    )
                    if name
                ),
            ),
        )
        self.upkeep = Upkeep(self.store, self.pool)
        try:
            if self._imports_torch:  # the runners load meanwhile
                import_gateway()
            self.store.close()  # SQLite's connections must not cross a fork; it opens others
            self.gateway.start()
            if self._vllm:  # after the gateway, which may be a fork: supervision has a thread
                self._vllm.start()
        except BaseException:
            self.pool.stop()
            self._stop_servers()
            raise
        return self

    def _start_runners(self, runners: RunnerConfig) -> PoolHandle | RayPool:
        config = self.config
        if config.rollouts.runners_on != "ray":
            return start_pool(runners)
        from agentrl.runner.ray import RayPool

        host = config.gateway.host if isinstance(config, TrainConfig) else None
        return RayPool(runners, host)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.store.end_run(self.run_id, "failed")
        try:
            self.pool.stop()
        finally:
            self._stop_servers()

    def _stop_servers(self) -> None:
        """After the runners: one that asks for the gateway's health would wait in vain."""
        self.gateway.stop()
        if self._vllm:
            self._vllm.stop()

    def _model_name(self) -> str:
        """What agents are told to ask for.

        Of several adapters none is *the* model: then it is a name that each agent's role decides.
        """
        if not self._settings.adapters:
            return self.config.model.name
        return self.config.sole_adapter or self.config.model.adapter

    def begin_stop(self) -> None:
        """Asks the runners to end: nothing more will be executed. Does not wait."""
        self.pool.begin_stop()

    def wait_ready(self, on_wait: Callable[[str], object]) -> None:
        """Returns when the gateway answers.

        Args:
            on_wait: is told, now and then, what it is waiting for.

        Raises:
            RunError: it cannot start, or keeps dying, or takes too long; with the end of its log.
        """
        waiting = Waiting(on_wait)
        limit = _READY_TIMEOUT_S + (self._settings.vllm_wait or 0)
        if self._vllm:
            limit = _VLLM_READY_TIMEOUT_S
        while (health := self.gateway.health()) is None:
            if self._vllm and self._vllm.restarts >= 2:
                raise RunError(
                    f"vLLM does not start; the end of {self._vllm.log}:\n{self._vllm.log_tail()}"
                )
            hopeless = self.gateway.could_not_start or self.gateway.restarts >= 2
            if hopeless or waiting.seconds > limit:
                raise RunError(
                    f"the gateway does not start; the end of {self.folder.logs / 'gateway.log'}:\n"
                    f"{self.gateway.log_tail()}"
                )
            waiting.still(lambda: self._what_starts(waiting.seconds))
            time.sleep(_POLL_S)
        self.why_not_lean = health["sampler"].get("why_not_lean")

    def _what_starts(self, seconds: float) -> str:
        what, log_tail = "the gateway", self.gateway.log_tail
        if self._vllm:
            what, log_tail = "vLLM", self._vllm.log_tail
        said = log_tail(1)
        return f"{what} starts since {seconds:.0f} s" + (f": {said}" if said else "")

    def publish(
        self, name: str, version: int, path: str, step: int, on_trouble: Callable[[str], None]
    ) -> None:
        """Makes a saved adapter the one that answers; returns when the sampler has it.

        The store is told first: a gateway that restarts in between loads it from there.

        Args:
            on_trouble: is told, now and then, what it is waiting for.

        Raises:
            RunError: the sampler refuses it, or keeps dying.
        """
        self.store.publish_adapter(self.run_id, name, version, path, step)
        what, restarts = f"adapter {name}@{version}", self._restarts()
        waiting, refused_since, pause = Waiting(on_trouble), None, _POLL_S
        while problem := self.gateway.try_load_adapter(name, version, path):
            now = time.monotonic()
            refused_since = (refused_since or now) if problem.refused else None
            refused = refused_since is not None and now - refused_since >= _REFUSED_S
            if refused or self._restarts() - restarts >= _HOPELESS_RESTARTS:
                raise RunError(f"{what} cannot be published: {problem.text}")
            waiting.still(lambda why=problem.text: f"{what} is not published yet: {why}")
            self.upkeep.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def execute(
        self, new: Sequence[NewRollout], on_progress: Callable[[int, int], None]
    ) -> list[Rollout]:
        """Runs rollouts to their end, ahead of the queue; ``on_progress`` gets (finished, all).

        Raises:
            RunError: the runners or the gateway keep dying and nothing gets finished.
        """
        # Before what nobody waits for: rollouts of later steps may be queued by the hundred.
        ids = self.store.enqueue(self.run_id, new, first=True)

        def look() -> tuple[int, int, bool]:
            done = len(ids) - self.store.unfinished(ids)
            return done, len(ids), done == len(ids)

        self.wait(look, on_progress)
        return self.store.rollouts(self.run_id, ids=ids)

    def enqueue(self, new: Sequence[NewRollout]) -> list[str]:
        """Queues rollouts, which runners execute whether anybody waits or not; returns ids."""
        return self.store.enqueue(self.run_id, new)

    def wait(
        self, look: Callable[[], tuple[int, int, bool]], on_progress: Callable[[int, int], None]
    ) -> None:
        """Looks after leases and runners until it is enough.

        Args:
            look: (finished, all, whether that is enough); ``on_progress`` gets the first two.

        Raises:
            RunError: the runners or the gateway keep dying and nothing gets finished.
        """
        finished, restarts = -1, self._restarts()
        while True:
            self.upkeep.look()
            done, total, enough = look()
            if done > finished:
                finished, restarts = done, self._restarts()
                on_progress(done, total)
            if enough:
                return
            if self._restarts() - restarts >= _HOPELESS_RESTARTS:
                raise RunError(
                    "gateway and runners keep dying and no rollout gets finished; see "
                    f"{self.folder.logs}\n{self.gateway.log_tail()}\n{self.pool.log_tail(5)}"
                )
            time.sleep(_POLL_S)

    def _restarts(self) -> int:
        vllm = self._vllm.restarts if self._vllm else 0
        return self.gateway.restarts + self.pool.restarts + vllm


def _tinker_settings(config: TrainConfig | EvalConfig | RunConfig) -> dict[str, Any]:
    if not isinstance(config, TrainConfig) or config.run.backend == "local":
        return {}
    return {
        "tinker": True,
        "tinker_base_url": config.tinker.base_url,
        "tinker_tokenizer": config.tinker.tokenizer,
    }


def _other_models(config: TrainConfig | EvalConfig | RunConfig) -> dict[str, dict[str, Any]]:
    """The table of other models; the one that is evaluated also under the policy's name."""
    models = config.model_dump(mode="json")["models"]
    if isinstance(config, EvalConfig) and config.model.answered_by is not None:
        models[config.model.adapter] = models[config.model.answered_by] | {"is_policy": True}
    return models


def rollout_seed(*parts: object) -> int:
    """A seed that depends on these parts alone. 63 bits: it fits a signed integer column."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def plan_evaluation(
    task_ids: Sequence[str], step: int, samples: int, seed: int, temperature: float
) -> list[NewRollout]:
    """Rollouts that measure: their temperature is ours, whatever the agent asks for."""
    sampling: Json = {"force": {"temperature": temperature}}
    return [
        NewRollout(
            task_id=task_id,
            group_id=f"eval-{step}-{task_id}",
            purpose=Purpose.EVAL,
            step=step,
            index=index,
            seed=rollout_seed(seed, "eval", step, task_id, index),
            sampling=sampling,
        )
        for task_id in task_ids
        for index in range(samples)
    ]


def failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Why rollouts failed, most frequent first."""
    counts: dict[str, int] = {}
    for rollout in rollouts:
        if rollout.state is not RolloutState.SUCCEEDED:
            reason = (rollout.reason or str(rollout.state)).strip().splitlines()[-1][:200]
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def outcomes_in_words(outcomes: Outcomes) -> str:
    """What failed, and what policies made of it, in one line; empty when nothing did."""
    quiet = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
    failed = {name: n for name, n in outcomes.attempts.items() if name not in quiet}
    parts: list[str] = []
    if failed:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(failed.items()))
        parts.append(f"{sum(failed.values())} attempts failed ({listed})")
    for policy, count in sorted(outcomes.policy_rewards.items()):
        parts.append(f"{count} got their reward from {policy}")
    return "; ".join(parts)
