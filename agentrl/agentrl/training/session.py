"""Start the store, gateway and runners of a run, keep them alive, and stop them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentrl.config.commands import EvalConfig, RunConfig, TrainConfig
from agentrl.config.secrets import secret_variables, store_url, without_password
from agentrl.console.output import stderr
from agentrl.gateway.group import Gateways
from agentrl.gateway.process import GatewayPlan, import_gateway
from agentrl.ray_cluster import places_of
from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig
from agentrl.runs.circumstances import note_failure
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import register
from agentrl.samplers.vllm.adapters import FILES_S
from agentrl.samplers.vllm.server import planned_servers
from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.scorer import Scorer
from agentrl.supervisor import SupervisedProcess
from agentrl.timing import PhaseTimer, Waiting, busy_core_seconds
from agentrl_proxy.server.listening import is_loopback
from agentrl_tracer.schemas import Call, NewRollout, Policies, Rollout, SkipReason
from agentrl_tracer.store import Store, StoreError

if TYPE_CHECKING:
    from agentrl.runner.ray import RayPool

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""Called with the numbers of finished and of all rollouts."""
CheckProgress = Callable[[], tuple[int, int, bool]]
"""Returns the numbers of finished and of all rollouts, and whether that is enough."""

_POLL_S = 0.03
_REST = 4  # times as long as a look at the rollouts took
_LONGEST_POLL_S = 1.0  # while an adapter is being published
_MAINTAIN_S = 0.5  # between looks for expired leases
_BEAT_S = 10.0
_FAREWELL_S = 1.0  # for a store that is away, to note that the run has ended
_REFUSED_S = {"unfit": 3.0, "files_not_found": FILES_S}
"""Seconds before a refusal counts: a dying vLLM refuses too, and a shared folder may lag."""
_HOPELESS_RESTARTS = 5  # restarts in a row without anything getting done


class RunError(RuntimeError):
    """The run cannot continue; the message says why and where to look."""


class Session:
    """Gateways and runners of one run, as a context manager.

    A folder that already holds a run continues it: what its processes left unfinished is canceled.
    The folder is locked for as long as ``folder`` lives.

    Args:
        kind: ``train``, ``check``, ``eval`` or ``run``, for the list of runs.
        adapter_paths: fixed adapters to answer with. Without them, an evaluation or a single run
            is answered by the base model, and a training by its own adapters' versions.
        asks_for: the model that the agent is told to ask for; by default the run's own.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig | EvalConfig | RunConfig,
        kind: str,
        *,
        adapter_paths: Mapping[str, Path] | None = None,
        asks_for: str | None = None,
    ) -> None:
        folder.lock()
        self.folder = folder
        self.config = config
        as_training = config if isinstance(config, TrainConfig) else None
        self._computes = as_training is not None  # in this process, too
        self._training = training = as_training if kind == "train" else None
        shared = training and training.run.store
        paths = dict(adapter_paths or {})
        log, max_rank = folder.logs / "vllm.log", training and training.learning.rank
        # What it refuses is refused before there is a run.
        self._servers = planned_servers(config, log, max_rank=max_rank, adapters=paths.values())
        self.store = Store(store_url(shared) if shared else str(folder.store))
        self.run_id = self._register(kind)
        own = bool(training or paths)
        self._plan = GatewayPlan.of(
            config,
            vllm_url=None,
            tinker=as_training.tinker
            if as_training and as_training.run.backend == "tinker"
            else None,
            rollouts=config.rollouts,
            store=self.store.url,
            run_id=self.run_id,
            operator_key=f"sk-operator-{secrets.token_urlsafe(24)}",
            adapters=tuple(config.trained) if own else (),
            default_adapter=config.sole_adapter if own else None,
            agents=config.adapter_of_agent if own else {},
            adapter_paths=paths,
            # A check asks for what a training would.
            base_names=tuple(config.trained) if as_training and not training else (),
            trains_beside=bool(as_training and as_training.rollouts.max_staleness),
            answered_by=config.model.answered_by if isinstance(config, EvalConfig) else None,
        )
        # With several adapters, agents ask for a name that the role of each resolves.
        as_adapter = own or as_training is not None
        named = (config.sole_adapter or config.model.adapter) if as_adapter else config.model.name
        self._asks_for = asks_for or named
        self.started, self._busy_before = time.perf_counter(), busy_core_seconds()
        self.gateways: Gateways
        self.pool: SupervisedProcess | RayPool
        self.watch: Callable[[], None] = lambda: None  # may raise, to give up rollouts under way
        self._next_maintenance = 0.0
        self._told_lost = False
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def _register(self, kind: str) -> str:
        """Return the run's id, new or as the folder has it, and store its settings."""
        named = {"on_error", "on_timeout", "on_missing_reward", "max_attempts"}
        policies = Policies(**self.config.rollouts.model_dump(include=named))
        run_id, resumed = register(self.folder, self.store, kind, self.config, policies)
        if resumed:
            self.store.cancel(run_id, "the run was resumed")
        return run_id

    def __enter__(self) -> Self:
        try:
            self.gateways = self._listen()
            self.store.announce_gateways(self.run_id, self.gateways.urls_for_others)
            self.pool = self._start_runners()
        except BaseException as error:
            self._note_end(error)
            raise
        try:
            if self._computes:
                # This process needs torch, too, and a gateway that can be forked then is ready 2 s
                # sooner and shares that memory. The runners load meanwhile.
                import_gateway()
            self.store.close()  # SQLite's connections must not cross a fork; it opens others
            self.gateways.start()
            # After the gateways, which may be forked: supervision starts a thread.
            self.pool.supervise()
            self._heart.start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _listen(self) -> Gateways:
        own = self._training and self._training.gateway
        host, port = (own.host, own.port) if own else ("127.0.0.1", 0)
        count, logs = self.config.gateway_count, self.folder.logs
        try:
            return Gateways(self._plan, count, logs, host, port, self._servers)
        except OSError as error:
            raise RunError(f"gateway.host/gateway.port: cannot listen there: {error}") from error

    def _start_runners(self) -> SupervisedProcess | RayPool:
        config = self.config
        how = config.rollouts
        runners = RunnerConfig(
            store=self.store.url, gateways=self.gateways.urls, run_id=self.run_id,
            agent=config.agent.entrypoint, model=self._asks_for, logs=str(self.folder.logs),
            runners=how.runners, timeout_s=how.timeout, lease_s=how.lease,
            concurrency=how.concurrency, rollouts_per_process=how.rollouts_per_process,
            log_bytes=how.log_mib << 20, python=config.agent.python,
            user=config.agent.user, sandbox=config.agent.sandbox,
            hidden=[str(self.folder.root)],
            withheld=secret_variables(config),
        )  # fmt: skip
        if config.rollouts.runners_on != "ray":
            return start_pool(runners)
        from agentrl.runner.ray import RayPool

        if (training := self._training) is None:
            return RayPool(runners)
        return RayPool(runners, training.gateway.host, places_of(training))

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            stderr.print("agents and gateway are being stopped; another signal ends at once")
        if error is not None:
            # Before anything is stopped, which may take longer than a signal leaves.
            self._note_end(error)
        self._stop()

    def _note_end(self, error: BaseException) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        with self.farewell():
            if not interrupted:
                note_failure(self.folder, error)
            self.store.end_run(self.run_id, "interrupted" if interrupted else "failed")

    @contextlib.contextmanager
    def farewell(self) -> Iterator[None]:
        """Write what is left to write, and wait for no store; the error that ends the run is the
        one to tell."""
        self.store.db.patience_s = _FAREWELL_S
        with contextlib.suppress(Exception):
            yield

    def _stop(self) -> None:
        self._ended.set()
        self.gateways.let_end()
        try:
            self.pool.stop()
        finally:  # after the runners, which ask for the gateways' health
            self.gateways.stop()

    def _beat(self) -> None:
        """Tell other machines that this process lives."""
        store: Store | None = None
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(StoreError):  # the run itself says that the store is away
                store = store or Store(self.store.url, patience_s=0)
                store.beat(self.run_id)
        if store is not None:
            store.close()

    def wait_ready(self, on_wait: Callable[[str], object]) -> dict[str, Any]:
        """Wait for the gateways, and return the health of the first.

        Args:
            on_wait: receives, now and then, what is starting.

        Raises:
            RunError: one, or a vLLM server that it needs, cannot start, keeps dying or takes too
                long; quotes the end of its log.
        """
        try:
            return self.gateways.wait_ready(on_wait)
        except RuntimeError as error:
            raise RunError(str(error)) from error

    def add_start(self, timer: PhaseTimer) -> None:
        """Add the time since the session was made, as the phase ``start``."""
        seconds = time.perf_counter() - self.started
        timer.add_phase("start", seconds, busy_core_seconds() - self._busy_before)

    def publish(
        self, name: str, version: int, path: str, step: int, on_trouble: Callable[[str], None]
    ) -> None:
        """Make a saved adapter the one that answers; return when the samplers have loaded it.

        The store is written first: a gateway that restarts in between loads the adapter from there.

        Args:
            on_trouble: receives, now and then, why the adapter is not loaded yet.

        Raises:
            RunError: the sampler refuses it, or keeps dying.
        """
        self.store.publish_adapter(self.run_id, name, version, path, step)
        what, restarts = f"adapter {name}@{version}", self._restarts()
        waiting, refused, pause = Waiting(on_trouble), ("", 0.0), _POLL_S
        while trouble := self.gateways.try_load_adapter(name, version, path):
            now, why, refusal = time.monotonic(), trouble.why, trouble.refusal
            if trouble.deferred:
                on_trouble(f"{what} is published; a gateway without a sampler follows: {why}")
                return
            refused = refused if refused[0] == refusal else (refusal, now)
            hopeless = refusal and now - refused[1] >= _REFUSED_S[refusal]
            if hopeless or self._keep_dying(restarts):
                raise RunError(f"{what} cannot be published: {why}")
            waiting.still(lambda why=why: f"{what} is not published yet: {why}")
            self.maintain()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def execute(self, new: Sequence[NewRollout], on_progress: OnProgress) -> list[Rollout]:
        """Run rollouts of one step to their end, ahead of those queued for later steps.

        Raises:
            RunError: the runners or the gateway keep dying and no rollout finishes.
        """
        ids = self.store.enqueue(self.run_id, new, first=True)
        purpose, step = new[0].purpose, new[0].step

        def check() -> tuple[int, int, bool]:
            unfinished = self.store.unfinished_ids(self.run_id, purpose, since_step=step)
            done = len(ids) - len(unfinished.intersection(ids))
            return done, len(ids), done == len(ids)

        self.wait(check, on_progress)
        return self.store.rollouts(self.run_id, ids=ids)

    def skip_calls(self, rollout_ids: Sequence[str], reason: SkipReason) -> list[Call]:
        """Judge all calls of rollouts that no step trains on; return the calls."""
        calls = self.store.calls(rollout_ids=rollout_ids, bodies=False)
        self.store.settle(trained={}, skipped={call.id: reason for call in calls}, calls=calls)
        return calls

    def wait(self, check: CheckProgress, on_progress: OnProgress) -> None:
        """Maintain leases until ``check`` says enough.

        Raises:
            RunError: the runners or the gateway keep dying and no rollout finishes.
        """
        finished, restarts = -1, self._restarts()
        while True:
            self.maintain()
            self.watch()
            began = time.monotonic()
            done, total, enough = check()
            if done > finished:
                finished, restarts = done, self._restarts()
                on_progress(done, total)
            if enough:
                return
            if self._keep_dying(restarts):
                raise RunError(
                    "gateways and runners keep dying and no rollout finishes; see "
                    f"{self.folder.logs}\n{self.gateways.log_tail()}\n{self.pool.log_tail(5)}"
                )
            # A look at 100,000 rollouts takes a while: rest for longer than that.
            time.sleep(max(_POLL_S, _REST * (time.monotonic() - began)))

    def result(self, future: Future[T], *, watch: bool = False) -> T:
        """Wait for a computation in another thread while runners work on later steps.

        Args:
            watch: give it up where the run's budget is spent.
        """
        while not wait([future], timeout=_MAINTAIN_S).done:
            self.maintain()
            if watch:
                self.watch()
        return future.result()

    def scorer(self, functions: Sequence[RewardFunction], note: Callable[[str], object]) -> Scorer:
        """Return what computes rewards of this run's rollouts."""
        plan = self._plan
        context = ScoringContext(
            self.store, self.run_id, self.folder.root, note, self.config.models,
            self.gateways.urls[0], plan.operator_key,
            [plan.model.name, *plan.base_names, *plan.adapters],
        )  # fmt: skip
        return Scorer(functions, context, wait=partial(self.result, watch=True))

    def how_to_join(self) -> str | None:
        """Return the command that adds runners; None where the gateway is not set up for any."""
        training = self._training
        if not training or (training.gateway.port == 0 and is_loopback(training.gateway.host)):
            return None
        shared = training.run.store
        store = without_password(shared) if shared else self.folder.store
        url, *more = self.gateways.urls_for_others
        gateway = "" if more else f" --gateway {url}"  # the store tells the runners of several
        return f"agentrl runner --store {store}{gateway}"

    def tell_lost_spans(self, note: Callable[[str], object], *, last: bool = False) -> None:
        """Report once that the OTLP backend does not take what it is sent.

        Args:
            last: there will be no further look; what still waits counts, too.
        """
        target = self.config.gateway.forward_otlp
        if target is None or self._told_lost:
            return
        stats = Counter[str]()
        for health in self.gateways.healths():
            stats.update((health or {}).get("forward_otlp") or {})
        lost, sent = stats["lost"], stats["sent"]
        waiting = stats["queued"] if last and not sent else 0
        if lost or waiting:
            self._told_lost = True
            note(
                f"gateway.forward_otlp: {target} has not taken {lost + waiting} spans ({sent} "
                f"arrived); {self.folder.logs} says why"
            )

    def maintain(self) -> None:
        """End leases that ran out. Cheap: call it while waiting."""
        if time.monotonic() >= self._next_maintenance:
            self.store.expire_leases()
            self._next_maintenance = time.monotonic() + _MAINTAIN_S

    def _restarts(self) -> list[int]:
        return [*self.gateways.restarts, self.pool.restarts]

    def _keep_dying(self, before: Sequence[int]) -> bool:
        """Tell whether a process has died too often since ``before``, of ``_restarts``."""
        new = (now - then for now, then in zip(self._restarts(), before, strict=True))
        return max(new) >= _HOPELESS_RESTARTS
