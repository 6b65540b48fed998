"""Write rows of metrics to ``metrics.jsonl``, the store and the trackers, each row once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.training.metrics import finite_numbers
from agentrl.training.trackers import MAY_HOLD_SECRETS, Trackers
from agentrl_tracer.store import Store


class MetricsLog:
    """The metrics of one run.

    Args:
        note: receives a message when a tracker fails.

    Raises:
        ConfigError: the package of a configured tracker is not installed.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        store: Store,
        run_id: str,
        note: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._store = store
        self._run_id = run_id
        settings = config.model_dump(mode="json", exclude=MAY_HOLD_SECRETS)
        self._trackers = Trackers(config.run.trackers, folder, settings, note)
        self.close = self._trackers.close
        self.rows = folder.read_metrics

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._folder.append_metrics(row)
        self._store.log_metrics(self._run_id, step, finite_numbers(row))
        self._trackers.log(step, row)

    def held_out(self) -> dict[int, float]:
        """Return the held-out accuracies measured so far, by step."""
        return {row["step"]: row[HELD_OUT] for row in self.rows() if HELD_OUT in row}

    def go_back(self, step: int, checkpointed: Mapping[str, Any] | None) -> None:
        """Keep the rows up to ``step`` and open the trackers.

        Args:
            checkpointed: the row of ``step`` in its checkpoint. It is logged where the process died
                between checkpoint and log, and lacks the seconds of what came after.
        """
        rows = self.rows()
        self._folder.keep_metrics(lambda row: row["step"] <= step)
        self._store.drop_metrics_after(self._run_id, step)
        self._trackers.begin(step if rows else None, rows)
        of_step = [row for row in rows if row["step"] == step]
        for row in of_step:  # the process may have died between the file and the store
            self._store.log_metrics(self._run_id, step, finite_numbers(row))
        if checkpointed is not None and not any(REWARD in row for row in of_step):
            self.log(step, checkpointed)
