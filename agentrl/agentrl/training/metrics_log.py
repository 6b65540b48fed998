"""A run's rows of metrics, everywhere they go: ``metrics.jsonl``, the store, the trackers.

Each row is there once, also where the process died between two of these places. Does not know what
the numbers mean; ``step_row`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.training.metrics import finite_numbers
from agentrl.training.trackers import MAY_HOLD_SECRETS, Trackers
from agentrl_tracer.store import Store


class Journal:
    """``note`` is told of a tracker that fails.

    Raises:
        ConfigError: a tracker is asked for whose package is not installed.
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
        self._trackers = Trackers(
            config.run.trackers,
            folder,
            config.model_dump(mode="json", exclude=MAY_HOLD_SECRETS),
            note,
        )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._folder.append_metrics(row)
        self._store.log_metrics(self._run_id, step, finite_numbers(row))
        self._trackers.log(step, row)

    def rows(self) -> list[dict[str, Any]]:
        return self._folder.read_metrics()

    def held_out(self) -> dict[int, float]:
        """The accuracies measured so far, by step."""
        return {row["step"]: row[HELD_OUT] for row in self.rows() if HELD_OUT in row}

    def go_back(self, step: int, last: Mapping[str, Any] | None) -> None:
        """Keeps what there is up to ``step``, and opens the trackers.

        Args:
            last: that step's row, from its checkpoint: without the seconds of what came after, it
                stands in where the process died before it was logged.
        """
        rows = self.rows()
        self._folder.keep_metrics(lambda row: row["step"] <= step)
        self._store.drop_metrics_after(self._run_id, step)
        self._trackers.begin(step if rows else None, rows)
        of_step = [row for row in rows if row["step"] == step]
        for row in of_step:  # it may have died between the file and the store
            self._store.log_metrics(self._run_id, step, finite_numbers(row))
        if last is not None and not any(REWARD in row for row in of_step):
            self.log(step, last)

    def close(self) -> None:
        self._trackers.close()
