"""End a run early, and in order: its goal is reached, nothing improves, a budget, a collapse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.guards.alerts import (
    WINDOW,
    Alert,
    collapse_in,
    evaluation_alerts,
    step_alerts,
)
from agentrl.guards.answers import answer_metrics
from agentrl.guards.budget import Budget
from agentrl.runs.best_adapter import best_step, keep_best
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD, WENT_BACK
from agentrl.runs.recorded import shown
from agentrl.runs.summary import Ending
from agentrl_tracer.schemas import Call, Purpose, Rollout
from agentrl_tracer.store import Store

_SLOWER = 0.5  # the learning rate after going back


class Guards:
    """The guards of one run. They judge by its rows of metrics, so a resumed run goes on as before.

    Args:
        started: when this process began, by ``time.perf_counter``.
        learning_rate: the highest of the schedule.
        eval_tasks: how many held-out tasks there are.
        note: receives what the user should know.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        store: Store,
        run_id: str,
        *,
        started: float,
        learning_rate: float,
        eval_tasks: int,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._note = config, folder, note
        self._learning_rate = learning_rate
        self._eval_rollouts = eval_tasks * config.evaluation.samples
        self.budget = Budget(
            config.guards, folder, store, run_id,
            started=started, ahead=config.rollouts.max_staleness, note=note,
        )  # fmt: skip
        self.held_out: dict[int, float] = {}
        """The accuracies so far, by step."""
        self._steps: list[Mapping[str, Any]] = []  # their rows
        self._evaluation: Mapping[str, Any] = {}  # the newest row
        self._collapse: str | None = None
        """Name of the newest row's alert."""
        self._went_back = -1
        """The step that the run went back to, if it did."""

    @property
    def best(self) -> int | None:
        """The step with the best held-out accuracy."""
        return best_step(self.held_out)

    def begin(self, step: int) -> None:
        """Go on after ``step``, with the rows of metrics that the folder has."""
        rows = self._folder.read_metrics()
        self._steps = [row for row in rows if REWARD in row]
        evaluations = [row for row in rows if HELD_OUT in row]
        self.held_out = {row["step"]: row[HELD_OUT] for row in evaluations}
        self._went_back = max((row["step"] for row in rows if WENT_BACK in row), default=-1)
        guards = self._config.guards
        rolls_back = guards.on_collapse == "roll_back" and guards.roll_backs > 0
        if rolls_back and self.best and step > self._went_back:
            # The process may have died before it went back.
            self._collapse = collapse_in([row for row in rows if row["step"] == step])
        self._evaluation = evaluations[-1] if evaluations else {}
        self.budget.begin(step, evaluated=step in self.held_out)
        keep_best(self._folder, self._config.trained, self.best)

    def after_step(
        self,
        row: dict[str, Any],
        calls: Sequence[Call],
        rollouts: Sequence[Rollout],
        rewards: Mapping[str, float | None],
    ) -> None:
        """Add to a step's row what its answers are like, and the alerts."""
        adapters = list(self._config.trained)
        for name in adapters:
            own = [call for call in calls if call.adapter == name]
            prefix = f"{name}/" if len(adapters) > 1 else ""
            metrics = answer_metrics(own, rollouts, rewards)
            row |= {prefix + metric: value for metric, value in metrics.items()}
        before = self._steps[-1] if self._steps else {}
        self._steps.append(row)
        int8 = self._config.sampler.weights == "int8"
        alerts = step_alerts(self._steps, adapters, int8=int8) if self._judges(row["step"]) else []
        self._collapse = next((alert.metric for alert in alerts if alert.collapse), None)
        self._tell(alerts, before)
        row |= {alert.metric: 1.0 for alert in alerts}
        self.budget.settle(Purpose.TRAIN, row["step"], calls, _judges_cost(row))

    def _judges(self, step: int) -> bool:
        """Whether the newest steps tell of policies that were trained since the run went back."""
        first = self._went_back + 1 + self._config.rollouts.max_staleness  # their rollouts are old
        return self._went_back < 0 or step - first >= WINDOW

    def after_evaluation(self, row: dict[str, Any], calls: Sequence[Call]) -> None:
        """Add the alerts to an evaluation's row."""
        self.held_out[row["step"]] = row[HELD_OUT]
        best = best_step(self.held_out) or 0
        alerts = evaluation_alerts(
            self.held_out, best, self._steps, self._eval_rollouts,
            staleness=self._config.rollouts.max_staleness,
        )  # fmt: skip
        self._collapse = self._collapse or next((alert.metric for alert in alerts), None)
        self._tell(alerts, self._evaluation)
        row |= {alert.metric: 1.0 for alert in alerts}
        self._evaluation = row
        self.budget.settle(Purpose.EVAL, row["step"], calls, _judges_cost(row))

    def _tell(self, alerts: Sequence[Alert], before: Mapping[str, Any]) -> None:
        """Show alerts that the row before did not have."""
        for alert in alerts:
            if alert.metric not in before:
                self._note(f"{alert.metric}: {alert.sentence}")

    def why_end(self) -> Ending | None:
        """Tell why the run ends before its next step; None: it goes on."""
        how, held_out = self._config.evaluation, self.held_out
        newest, best = max(held_out, default=None), self.best
        if newest is not None and how.stop_at is not None and held_out[newest] >= how.stop_at:
            return Ending(
                "evaluation.stop_at",
                f"held-out accuracy {held_out[newest]:.1%} has reached {how.stop_at:.1%}",
            )
        if best is not None and how.patience is not None:
            vain = sum(step > best for step in held_out)
            if vain >= how.patience:
                return Ending(
                    "evaluation.patience",
                    f"{vain} evaluations were no better than {held_out[best]:.1%} at step {best}",
                )
        if (collapse := self.why_collapsed()) is not None:
            return collapse
        if why := self.budget.why_no_step():
            return Ending(*why, evaluates=True)
        return None

    def why_collapsed(self) -> Ending | None:
        """Tell how the run ends because its policy has collapsed; None: it has not."""
        guards, rate = self._config.guards, self._learning_rate * _SLOWER
        alert, best = self._collapse, self.best
        if alert is None or guards.on_collapse == "note":
            return None
        if not best:
            why = "no trained step has been evaluated"
            if any(self.held_out):
                why = "no evaluated step is better than the model before training"
            return Ending(
                "guards.on_collapse",
                f"{alert}; {why}: start again with a lower learning rate, such as "
                f"--learning-rate {rate:g}",
            )
        again = ["train", "--resume", f"{shown(self._folder.root)}@{best}"]
        again += ["--learning-rate", repr(rate)]
        if guards.on_collapse == "roll_back" and guards.roll_backs:
            again += ["--guards.roll-backs", str(guards.roll_backs - 1)]
            said = f"{alert}; going back to step {best}, with the learning rate {rate:g}"
            return Ending("guards.on_collapse", said, again=again, rolls_back=True)
        said = f"{alert}; step {best} is the best"
        return Ending("guards.on_collapse", said, again=again)


def _judges_cost(row: Mapping[str, Any]) -> float:
    """Return the dollars of the judges, whose calls belong to no rollout."""
    theirs = (name for name in row if name.removeprefix("eval/").startswith("judge/"))
    return sum(row[name] for name in theirs if name.endswith("/cost"))
