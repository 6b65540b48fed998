"""The loop of a sweep: ask for values, train, report the metric, stop the hopeless."""

from __future__ import annotations

import contextlib
import statistics
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from agentrl.capacity import available_cores
from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl.runs.folder import RunFolder
from agentrl.sweep.process import start_training, why_failed
from agentrl.sweep.space import Space, trial_settings
from agentrl.sweep.study import BEST, SweepResults, figure_of, settings_of

if TYPE_CHECKING:
    from optuna import Study, Trial

_POLL_S = 0.5
_MOST_STARTS = 4
"""Processes of one run that this sweep starts: something kills them."""

_HOPELESS = 3
"""Trials that failed before any was complete: the settings are wrong for all."""


class _FailedError(Exception):
    """A trial cannot be trained."""


class _EndingError(Exception):
    """The sweep ends before the trial, which goes on in the next one."""


@dataclass
class Sweep:
    """A sweep in progress; its folder is locked. A thread works on each trial.

    Args:
        steps: of a run, where the sweep does not choose them.
    """

    folder: RunFolder
    config: SweepConfig
    space: Space
    study: Study
    steps: int

    def __post_init__(self) -> None:
        self._ending, self._lock = Event(), Lock()
        trials = self.study.get_trials(deepcopy=False)
        self._left = [one for one in trials if not one.state.is_finished()]

    def run(self) -> None:
        """Run the trials that are left, as many at a time as the settings say.

        Raises:
            ConfigError: the runs do not record the metric.
            RuntimeError: every trial fails.
        """
        parallel = self.config.sweep.parallel
        with ThreadPoolExecutor(parallel) as pool:
            workers = [pool.submit(self._work) for _ in range(parallel)]
            try:
                for worker in as_completed(workers):
                    worker.result()
            finally:
                self._ending.set()

    def _work(self) -> None:
        with contextlib.suppress(_EndingError):
            while not self._ending.is_set() and (trial := self._next()) is not None:
                self._run_trial(trial)

    def _next(self) -> Trial | None:
        """Return a trial that a kill has left, or a new one; None if there are enough."""
        from optuna import Trial

        with self._lock:
            if self._left:
                trial, what = Trial(self.study, self._left.pop(0)._trial_id), "goes on"
            elif len(self.study.get_trials(deepcopy=False)) < self.study.user_attrs["total"]:
                trial, what = self.study.ask(), "begins"
            else:
                return None
            for name, kind in self.space.items():  # what was chosen before a kill stays
                trial._suggest(name, kind)
        self._say(trial, what)
        return trial

    def _run_trial(self, trial: Trial) -> None:
        """Train the runs of a trial, one for each seed, and tell the study how it ended."""
        from optuna import TrialPruned
        from optuna.trial import TrialState

        how, config = self.config, self.folder.root / "trials" / f"{trial.number:03d}.toml"
        cores = how.model.cores or self._cores()
        own = {"model.cores": cores, "run.group": how.run.group or self.folder.name}
        self._write(config, own | trial.params)
        name, seeds = f"{self.folder.name}-{trial.number:03d}", how.sweep.seeds
        names = [name] if seeds == 1 else [f"{name}-{seed}" for seed in range(seeds)]
        values: list[float] = []
        try:
            for seed, name in enumerate(names):
                trial.set_user_attr("runs", names[: seed + 1])
                run = RunFolder(self.folder.root.with_name(name))
                values.append(self._train(trial, config, run, seed))
        except TrialPruned:
            self._end(trial, "is pruned", state=TrialState.PRUNED)
        except _FailedError as why:
            trial.set_user_attr("reason", str(why))
            self._end(trial, "failed", state=TrialState.FAIL)
            states = [one.state for one in self.study.get_trials(deepcopy=False)]
            if states.count(TrialState.FAIL) >= _HOPELESS and TrialState.COMPLETE not in states:
                raise RuntimeError(f"every trial fails; the last: {why}") from why
        else:
            if seeds > 1:
                trial.set_user_attr("spread", statistics.stdev(values))
            self._end(trial, "is complete", values=statistics.fmean(values))

    def _train(self, trial: Trial, config: Path, run: RunFolder, seed: int) -> float:
        """Train a run to its end, though its processes may be killed; return its last value.

        Raises:
            TrialPruned: it is worse than others.
            _FailedError: it cannot be trained.
        """
        log, starts = config.with_name(f"{run.name}.log"), 0
        while run.is_in_use():  # a process of a sweep that was killed ends in a moment
            self._pause()
        while not run.summary.is_file():
            if starts == _MOST_STARTS:
                raise _FailedError(f"its process was ended {starts} times; see {log}")
            starts += 1
            number, job = self.config.run.seed + seed, self._ray_job()
            with start_training(run, config, number, log, job) as process:
                try:
                    self._watch(process, trial, run, judged=seed == 0)
                finally:
                    process.terminate()
                    process.wait()
            # A run that has learned nothing ends with 1, and has its metrics.
            why = None if run.summary.is_file() else why_failed(process.returncode, log)
            if why:
                raise _FailedError(why)
        if values := self._values(run):
            return values[max(values)]
        metric = self.config.sweep.metric
        names = sorted({name for row in run.read_metrics() for name in row})
        if metric in names:
            raise _FailedError(f"{metric} of {run.name} was never a finite number")
        raise ConfigError(f"sweep.metric: {run.name} has no {metric!r}; it has {', '.join(names)}")

    def _cores(self) -> int:
        if self.config.sweep.ray is not None:
            return max(1, int(self.config.sweep.ray.get("CPU", 1)))
        return max(1, available_cores() // self.config.sweep.parallel)

    def _ray_job(self) -> dict[str, Any] | None:
        """Return what a training as a Ray job needs; None if trainings stay on this machine."""
        if self.config.sweep.ray is None:
            return None
        shared = (self.config.run.store or "").startswith("postgresql")
        return {"resources": self.config.sweep.ray, "nodes_share_store": shared}

    def _watch(self, process: Popen[bytes], trial: Trial, run: RunFolder, *, judged: bool) -> None:
        """Wait for the end of a process; report the metric of a run that is ``judged``.

        Raises:
            TrialPruned: the pruner says so.
        """
        from optuna import TrialPruned

        reported = {*self.study.get_trials(deepcopy=False)[trial.number].intermediate_values}
        last_step, goes_on = trial.params.get("run.steps", self.steps), True
        while goes_on:
            self._pause()
            goes_on = process.poll() is None
            news = self._values(run) if judged else {}
            for step in sorted(news.keys() - reported):
                trial.report(news[step], step)
                reported.add(step)
                if goes_on and step < last_step and trial.should_prune():
                    run.pruned.touch()
                    raise TrialPruned

    def _values(self, run: RunFolder) -> dict[int, float]:
        """Return the metric by step, without the one before training."""
        metric = self.config.sweep.metric
        rows = [row for row in run.read_metrics() if row.get(metric) is not None]
        return {row["step"]: row[metric] for row in rows if row["step"]}

    def _pause(self) -> None:
        if self._ending.wait(_POLL_S):
            raise _EndingError

    def _end(self, trial: Trial, what: str, **told: Any) -> None:
        """Tell the study how a trial ended, and keep the best settings in a file."""
        with self._lock:
            with contextlib.suppress(RuntimeError):  # a grid's last point stops Optuna's own loop
                self.study.tell(trial.number, **told)
            found = SweepResults(self.study, self.folder)
            if (best := found.best) and best.number == trial.number:
                about = (
                    f"# Trial {best.number} of {found.name}: {found.metric} {figure_of(best)}\n\n"
                )
                self._write(self.folder.root / BEST, best.params, about)
        self._say(trial, what)

    def _write(self, path: Path, values: dict[str, Any], about: str = "") -> None:
        import tomli_w

        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.folder.write(path, about + tomli_w.dumps(trial_settings(self.config, values)))

    def _say(self, trial: Trial, what: str) -> None:
        now = self.study.get_trials(deepcopy=False)[trial.number]
        said = now.user_attrs.get("reason", f"{self.config.sweep.metric} {figure_of(now)}")
        said = said if now.state.is_finished() else settings_of(now)
        print_line(f"trial {now.number} {what}: {said}")
