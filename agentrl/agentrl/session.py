"""A run in progress: store, gateway and runners, together for as long as they are needed."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from agentrl.config import EvalConfig, TrainConfig
from agentrl.gateway import Gateway, GatewaySettings, import_gateway
from agentrl.run_folder import RunFolder
from agentrl.runner import PoolHandle, RunnerConfig, start_pool
from agentrl.vllm_server import planned_server
from agentrl_tracer.schemas import Json, NewRollout, Policies, Purpose, Rollout, RolloutState
from agentrl_tracer.store import Store

_POLL_S = 0.03
_SWEEP_S = 0.5  # between looks for expired leases
_READY_TIMEOUT_S = 600.0  # a large model takes minutes to load
_VLLM_READY_TIMEOUT_S = 1800.0  # it loads, compiles and warms up
_HOPELESS_RESTARTS = 5  # restarts in a row without anything getting done


class RunError(RuntimeError):
    """The run cannot go on; the message says why and where to look."""


class Session:
    """Starts the gateway and the runners; stops them on the way out, whatever happened.

    A folder that holds a run already is gone on with: what its processes left unfinished is
    cancelled.

    Args:
        kind: ``train`` or ``eval``, for the list of runs.
        base_only: answer with the base model, whatever the agent asks for.
        adapter_path: a fixed adapter to answer with, in place of the run's own versions.
        imports_torch: this process needs torch too. It imports it first, once for both: a gateway
            that is forked then is there 2 s sooner, and shares that memory.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig | EvalConfig,
        kind: str,
        *,
        base_only: bool = False,
        adapter_path: str | None = None,
        imports_torch: bool = False,
    ) -> None:
        self.folder = folder
        self.config = config
        shared = config.store if isinstance(config, TrainConfig) else None
        self.store = Store(shared or str(folder.store))
        self.run_id = self._register(kind)
        self._vllm = planned_server(
            config,
            folder.logs / "vllm.log",
            max_rank=config.rank if isinstance(config, TrainConfig) else None,
            adapter_path=adapter_path,
        )
        self._settings = GatewaySettings(
            store=self.store.url,
            model=config.model,
            adapter=None if base_only else config.adapter,
            device=config.device,
            dtype=config.dtype,
            operator_key=f"sk-operator-{secrets.token_urlsafe(24)}",
            run_id=self.run_id,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            models=config.model_dump(mode="json")["models"],
            adapter_path=adapter_path,
            max_concurrent=config.max_concurrent,
            max_calls_per_rollout=config.max_calls_per_rollout,
            max_tokens_per_rollout=config.max_tokens_per_rollout,
            vllm_url=self._vllm.url if self._vllm else config.vllm_url,
            vllm_key_env=config.vllm_key_env,
        )
        self._imports_torch = imports_torch
        self.started = time.perf_counter()
        self.gateway: Gateway
        self.pool: PoolHandle

    def _register(self, kind: str) -> str:
        """The run's id: made now, or the one the folder already has."""
        if self.folder.run_id.exists():
            run_id = self.folder.run_id.read_text().strip()
            self.store.end_run(run_id, "running")
            self.store.cancel(run_id, "the run was resumed")
            return run_id
        config = self.config
        policies = Policies(config.on_error, config.on_timeout, config.max_attempts)
        settings = config.model_dump(mode="json")
        run_id = self.store.create_run(self.folder.name, kind, settings, policies)
        self.folder.write_json(self.folder.config, settings)
        self.folder.run_id.write_text(run_id)
        return run_id

    def __enter__(self) -> Self:
        config = self.config
        self.gateway = Gateway(self._settings, self.folder.logs)
        self.pool = start_pool(
            RunnerConfig(
                store=self.store.url,
                gateway=self.gateway.url,
                run_id=self.run_id,
                agent=config.agent,
                model=self._settings.adapter or config.model,
                runners=config.runners,
                timeout_s=config.timeout,
                lease_s=config.lease,
                logs=str(self.folder.logs),
                rollouts_per_process=config.rollouts_per_process,
                withheld=tuple(
                    name
                    for name in (
                        config.vllm_key_env,
                        *(model.api_key_env for model in config.models.values()),
                    )
                    if name
                ),
            )
        )
        try:
            if self._imports_torch:  # the runners load meanwhile
                import_gateway()
            self.store.close()  # SQLite's connections must not cross a fork; it opens others
            self.gateway.start()
            if self._vllm:  # after the gateway, which may be a fork: supervision has a thread
                self._vllm.start()
        except BaseException:
            self.pool.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.stop()
        self.gateway.stop()  # after the runners: one that asks for its health would wait in vain
        if self._vllm:
            self._vllm.stop()

    def begin_stop(self) -> None:
        """Asks the runners to end: nothing more will be executed. Does not wait."""
        self.pool.begin_stop()

    def wait_ready(self) -> None:
        """Returns when the gateway answers.

        Raises:
            RunError: it keeps dying, or takes too long; with the end of its log.
        """
        vllm = self._settings.vllm_url is not None
        deadline = time.monotonic() + (_VLLM_READY_TIMEOUT_S if vllm else _READY_TIMEOUT_S)
        while self.gateway.health() is None:
            if self._vllm and self._vllm.restarts >= 2:
                raise RunError(
                    f"vLLM does not start; the end of {self._vllm.log}:\n{self._vllm.log_tail()}"
                )
            if self.gateway.restarts >= 2 or time.monotonic() > deadline:
                raise RunError(
                    f"the gateway does not start; the end of {self.folder.logs / 'gateway.log'}:\n"
                    f"{self.gateway.log_tail()}"
                )
            time.sleep(_POLL_S)

    def publish(self, name: str, version: int, path: str, step: int) -> None:
        """Makes a saved adapter the one that answers; returns when the sampler has it.

        The store is told first: a gateway that restarts in between loads it from there.
        """
        self.store.publish_adapter(self.run_id, name, version, path, step)
        restarts = self.gateway.restarts
        while problem := self.gateway.try_load_adapter(name, version, path):
            if self.gateway.restarts - restarts >= _HOPELESS_RESTARTS:
                raise RunError(f"adapter {name}@{version} cannot be published: {problem}")
            time.sleep(_POLL_S)

    def execute(
        self, new: Sequence[NewRollout], on_progress: Callable[[int, int], None]
    ) -> list[Rollout]:
        """Runs rollouts to their end; ``on_progress`` gets (finished, all).

        Raises:
            RunError: the runners or the gateway keep dying and nothing gets finished.
        """
        ids = self.store.enqueue(self.run_id, new)
        finished, restarts = -1, self._restarts()
        next_sweep = 0.0
        while True:
            if time.monotonic() >= next_sweep:
                self.store.expire_leases()
                next_sweep = time.monotonic() + _SWEEP_S
            if not self.pool.alive():
                self.pool.restart()
            done = len(ids) - self.store.unfinished(ids)
            if done > finished:
                finished, restarts = done, self._restarts()
                on_progress(done, len(ids))
            if done == len(ids):
                return self.store.rollouts(self.run_id, ids=ids)
            if self._restarts() - restarts >= _HOPELESS_RESTARTS:
                raise RunError(
                    "gateway and runners keep dying and no rollout gets finished; see "
                    f"{self.folder.logs}\n{self.gateway.log_tail()}"
                )
            time.sleep(_POLL_S)

    def _restarts(self) -> int:
        vllm = self._vllm.restarts if self._vllm else 0
        return self.gateway.restarts + self.pool.restarts + vllm


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
