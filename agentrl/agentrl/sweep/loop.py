"""The loop of a sweep: ask for values, run trials, report their metrics, stop the hopeless."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.capacity import available_cores
from agentrl.config.commands import SweepConfig, TrainConfig
from agentrl.config.setting_names import settings_of
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import shown
from agentrl.sweep.display import SweepDisplay
from agentrl.sweep.record import SweepRecord, TrialRow, write_record
from agentrl.sweep.space import Dimension, shared_settings, with_values
from agentrl.sweep.study import distribution, importances, tell, trials_of
from agentrl.sweep.trial import RunningTrial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_POLL_S = 0.5
_HOPELESS = 3
"""Trials that failed before any was complete: the settings are wrong for all."""


@dataclass
class Sweep:
    """A sweep in progress; its folder is locked.

    Args:
        steps: of a run, where the sweep does not choose them.
    """

    folder: RunFolder
    config: SweepConfig
    space: Sequence[Dimension]
    study: Study
    steps: int
    display: SweepDisplay
    active: list[RunningTrial] = field(default_factory=list[RunningTrial])

    def run(self) -> SweepRecord:
        """Run the trials that are left; return what was found.

        Raises:
            RuntimeError: every trial fails.
            ConfigError: the runs do not record the metric.
        """
        from optuna.trial import Trial, TrialState

        self._distributions = {one.name: distribution(one) for one in self.space}
        self._total = trials_of(self.config, self.space)
        known = {setting.name: setting.variable for setting in settings_of(TrainConfig)}
        self._hidden = [known[one.name] for one in self.space if one.name in known]
        for left in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._take(Trial(self.study, left._trial_id), "goes on")
        try:
            while self._fill() or self.active:
                changed = [self._advance(trial) for trial in list(self.active)]
                if any(changed):
                    self._publish()
                time.sleep(_POLL_S)
        finally:
            self._stop()
        return self._publish()

    def _fill(self) -> bool:
        """Ask for a trial if there is room; return whether one was begun."""
        full = len(self.active) >= self.config.sweep.parallel
        if full or len(self.study.get_trials(deepcopy=False)) >= self._total:
            return False
        self._take(self.study.ask(), "begins")
        self._publish()
        return True

    def _take(self, asked: Any, what: str) -> None:
        for name, kind in self._distributions.items():  # what was chosen before a kill stays
            asked._suggest(name, kind)
        params = dict(asked.params)
        settings = with_values(shared_settings(self.config), params)
        config = self.folder.root / "trials" / f"{asked.number:03d}.toml"
        write_toml(self.folder, config, settings)
        share = available_cores() // self.config.sweep.parallel
        cores = self.config.model.cores or max(1, share)
        group = self.config.run.group or self.folder.name
        flags = ["--model.cores", str(cores), "--run.group", group]
        runs, seed = self._runs(asked.number), self.config.run.seed
        trial = RunningTrial(asked, params, runs, config, flags, seed)
        self.active.append(trial)
        self.display.trial(what, self._row(trial))

    def _runs(self, number: int) -> list[RunFolder]:
        name, seeds = f"{self.folder.name}-{number:03d}", self.config.sweep.seeds
        names = [name] if seeds == 1 else [f"{name}-{seed}" for seed in range(seeds)]
        return [RunFolder(self.folder.root.parent / one) for one in names]

    def _advance(self, trial: RunningTrial) -> bool:
        """Look after a trial; return whether there is something new."""
        process = trial.process
        if process is not None and process.poll() is None:
            return not trial.pruned and self._report(trial)
        if process is not None:
            trial.code, trial.process = process.wait(), None
            assert process.stdin is not None
            process.stdin.close()
        if trial.pruned:
            self.active.remove(trial)
            return True
        if (state := trial.state()) == "running":
            return False
        if state == "finished":
            return self._run_ended(trial)
        if why := trial.hopeless(state):
            return self._failed(trial, why)
        trial.start(self._hidden)
        return True

    def _report(self, trial: RunningTrial) -> bool:
        """Report what is new in the run under way; stop the trial if the pruner says so."""
        rows = trial.rows(self.config.sweep.metric)
        if not rows or trial.last == rows[-1]:
            return False
        trial.last = rows[-1]
        if trial.at:  # the pruner looks at the first seed
            return True
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        steps = trial.params.get("run.steps", self.steps)
        for step, value in rows:
            if step not in reported:
                trial.study.report(value, step)
                if step < steps and trial.study.should_prune():
                    self._prune(trial)
                    break
        return True

    def _prune(self, trial: RunningTrial) -> None:
        from optuna.trial import TrialState

        tell(self.study, trial.number, state=TrialState.PRUNED)
        trial.pruned = True
        if trial.process is not None:
            trial.process.terminate()
        self.display.trial("is pruned", self._row(trial))

    def _run_ended(self, trial: RunningTrial) -> bool:
        rows = trial.rows(self.config.sweep.metric)
        if not rows:
            return self._failed(trial, f"{self.config.sweep.metric} was never a finite number")
        trial.values.append(rows[-1][1])
        if trial.next_run():
            return True
        if len(trial.values) > 1:
            trial.study.set_user_attr("spread", statistics.stdev(trial.values))
        return self._ended(trial, "is complete", values=statistics.fmean(trial.values))

    def _failed(self, trial: RunningTrial, why: str) -> bool:
        from optuna.trial import TrialState

        trial.study.set_user_attr("reason", why)
        self._ended(trial, "failed", state=TrialState.FAIL)
        states = [one.state for one in self.study.get_trials(deepcopy=False)]
        if states.count(TrialState.FAIL) >= _HOPELESS and TrialState.COMPLETE not in states:
            raise RuntimeError(f"every trial fails; the last: {why}")
        return True

    def _ended(self, trial: RunningTrial, what: str, **told: Any) -> bool:
        tell(self.study, trial.number, **told)
        self.active.remove(trial)
        self.display.trial(what, self._rows()[trial.number])
        return True

    def _stop(self) -> None:
        """End the trials' processes in order; they can be continued."""
        for trial in self.active:
            if trial.process is not None:
                trial.process.terminate()
        for trial in self.active:
            if trial.process is not None:
                trial.process.wait()

    # ---- what was found

    def _publish(self) -> SweepRecord:
        how = self.config.sweep
        space = [one.recorded() for one in self.space]
        record = SweepRecord(self.folder.name, how.metric, how.direction, self._total, space)
        record.trials, record.importance = self._rows(), importances(self.study)
        if best := record.best:
            path = self.folder.root / "best.toml"
            about = (
                f"The best trial of the sweep {self.folder.name}: {how.metric} {best.value:.4g} in "
                f"{', '.join(best.runs)}"
            )
            settings = with_values(shared_settings(self.config), best.params)
            write_toml(self.folder, path, settings, about)
            record.best_command = f"agentrl train --config {shown(path)}"
        write_record(self.folder, record)
        self.display.show(record)
        return record

    def _rows(self) -> list[TrialRow]:
        running = {trial.number: trial for trial in self.active if not trial.pruned}
        return [
            self._row(running[one.number]) if one.number in running else self._ended_row(one)
            for one in self.study.get_trials(deepcopy=False)
        ]

    def _row(self, trial: RunningTrial) -> TrialRow:
        runs = [run.name for run in trial.runs[: trial.at + 1]]
        step, value = trial.last or (0, None)
        state = "pruned" if trial.pruned else "running"
        return TrialRow(trial.number, state, dict(trial.params), runs, value, step=step)

    def _ended_row(self, one: FrozenTrial) -> TrialRow:
        state = {"FAIL": "failed"}.get(one.state.name, one.state.name.lower())
        runs = [run.name for run in self._runs(one.number) if run.exists()]
        attributes = one.user_attrs
        return TrialRow(
            one.number, state, dict(one.params), runs, one.value, attributes.get("spread"),
            one.last_step or 0, attributes.get("reason", ""),
        )  # fmt: skip


def write_toml(folder: RunFolder, path: Any, settings: dict[str, Any], about: str = "") -> None:
    import tomli_w

    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder.write(path, (f"# {about}\n\n" if about else "") + tomli_w.dumps(settings))
