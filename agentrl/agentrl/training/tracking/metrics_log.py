"""Write each row of metrics once: ``metrics.jsonl``, the store, and experiment trackers.

A tracker that fails is given up with a note: it never ends a run. After a resume, TensorBoard drops
the steps that are made again; the others keep what they were told first (the same numbers, for a
synchronous run).
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.training.metrics import finite_numbers
from agentrl.training.tracking.samples import samples_of
from agentrl.training.tracking.trackers import Samples, Tracker, open_tracker
from agentrl_tracer.store import Store


@dataclass(slots=True)
class MetricsLog:
    """The metrics of one run. ``go_back`` opens the trackers, before the first ``log``.

    Raises:
        ConfigError: the package of a configured tracker is not installed.
    """

    config: TrainConfig
    folder: RunFolder
    store: Store
    run_id: str
    note: Callable[[str], None]
    """Receives a message when a tracker fails."""
    _trackers: dict[str, Tracker] = field(init=False, default_factory=dict[str, Tracker])
    _told: dict[int, set[str]] = field(init=False, default_factory=lambda: defaultdict(set[str]))
    """The metrics of each step that were logged before a resume."""

    def __post_init__(self) -> None:
        for name in self.config.run.trackers:
            try:
                importlib.import_module(name)
            except ImportError as error:
                package = "mlflow-skinny" if name == "mlflow" else name
                how = f"pip install {package}, or leave it out"
                raise ConfigError(f"run.trackers: {name}: {error}; {how}") from error

    def go_back(self, step: int, checkpointed: Mapping[str, Any] | None) -> None:
        """Keep the rows up to ``step`` and open the trackers.

        Args:
            checkpointed: the row of ``step`` in its checkpoint. It is logged where the process died
                between checkpoint and log, and lacks the seconds of what came after.
        """
        rows = self.folder.read_metrics()
        self.folder.drop_metrics_after(step)
        self.store.drop_metrics_after(self.run_id, step)
        for row in rows:
            self._told[int(row["step"])].update(row)
        after = step if rows else None
        for name in self.config.run.trackers:
            with self._given_up_if_it_fails(name):
                self._trackers[name] = open_tracker(name, self.folder, self.config, after)
        of_step = [row for row in rows if row["step"] == step]
        for row in of_step:  # the process may have died between the file and the others
            self._publish(step, row)
        if checkpointed is not None and not any(REWARD in row for row in of_step):
            self.log(step, checkpointed)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self.folder.append_metrics(row)
        self._publish(step, row)

    def _publish(self, step: int, row: Mapping[str, Any]) -> None:
        numbers = finite_numbers(row)
        self.store.log_metrics(self.run_id, step, numbers)
        values = {name: value for name, value in numbers.items() if name != "step"}  # the axis
        news = {name: value for name, value in values.items() if name not in self._told[step]}
        samples: Samples = ()
        if HELD_OUT in values and self._trackers:
            samples = samples_of(self.folder, self.store, self.run_id, step)

        def tell(name: str, tracker: Tracker) -> None:
            # TensorBoard has dropped what a resumed run repeats; the others ignore it.
            if told := values if name == "tensorboard" else news:
                tracker.log(told, step, samples if HELD_OUT in told else ())

        self._each(tell)

    def show_picture(self, step: int) -> None:
        """Log the learning curve as it is after the run's last step."""
        self._each(lambda _, tracker: tracker.picture(self.folder.picture, step))

    def close(self, *, killed: bool = False) -> None:
        self._each(lambda _, tracker: tracker.close(killed=killed))

    def _each(self, tell: Callable[[str, Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._given_up_if_it_fails(name):
                tell(name, tracker)

    @contextmanager
    def _given_up_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker's server may be away
            self._trackers.pop(name, None)
            self.note(f"tracker {name} was given up: {type(error).__name__}: {error}")
