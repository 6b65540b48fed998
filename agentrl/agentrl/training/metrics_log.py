"""Write each row of metrics once: ``metrics.jsonl``, the store, TensorBoard, W&B, trackio.

Trackers are optional packages, imported only when configured. One that fails is given up with a
note: it never ends a run. After a resume, TensorBoard drops the steps that are made again; W&B and
trackio keep what they were told first (the same numbers, for a synchronous run).
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
from agentrl.runs.best_adapter import held_out_of
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import REWARD
from agentrl.training.metrics import finite_numbers
from agentrl_tracer.store import Store

_MAY_HOLD_SECRETS: dict[str, Any] = {
    "run": {"store"},
    "models": True,
    "sampler": {"vllm": {"url"}},
    "gateway": {"forward_otlp"},
}
"""Settings with URLs or parameters that may hold passwords: no tracker gets them."""


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
    _trackers: dict[str, Any] = field(init=False, default_factory=dict[str, Any])
    """Each has the interface of a run of W&B."""
    _told: dict[int, set[str]] = field(init=False, default_factory=lambda: defaultdict(set[str]))
    """The metrics of each step that were logged before a resume."""

    def __post_init__(self) -> None:
        for name in self.config.run.trackers:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"run.trackers: {name} cannot be imported ({error}); "
                    f"`pip install {name}`, or leave it out"
                ) from error

    def held_out(self) -> dict[int, float]:
        """Return the held-out accuracies measured so far, by step."""
        return held_out_of(self.folder)

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
        for name in self.config.run.trackers:
            with self._given_up_if_it_fails(name):
                self._trackers[name] = self._open(name, step if rows else None)
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
        for name, tracker in list(self._trackers.items()):
            with self._given_up_if_it_fails(name):
                # TensorBoard has dropped what a resumed run repeats; the others ignore it.
                if told := values if name == "tensorboard" else news:
                    tracker.log(told, step=step)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._given_up_if_it_fails(name):
                tracker.finish()

    @contextmanager
    def _given_up_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker's server may be away
            self._trackers.pop(name, None)
            self.note(f"tracker {name} was given up: {type(error).__name__}: {error}")

    def _open(self, name: str, step: int | None) -> Any:
        """Open a tracker; ``step`` is the one that a resumed run continues after."""
        folder = self.folder
        if name == "tensorboard":
            return _TensorBoard(folder, step)
        run_id = folder.run_id.read_text().strip()
        settings = self.config.model_dump(mode="json", exclude=_MAY_HOLD_SECRETS)
        common: dict[str, Any] = {"project": "agentrl", "resume": "allow", "config": settings}
        if name == "trackio":
            import trackio  # pyright: ignore[reportMissingImports]

            # trackio resumes by name, and another run's folder may have the same one.
            own_name = f"{folder.name}-{run_id[-8:]}"
            return trackio.init(name=own_name, embed=False, auto_log_cpu=False, **common)
        import wandb  # pyright: ignore[reportMissingImports]

        # The run's own id: a resumed run continues in the same place.
        return wandb.init(
            name=folder.name, id=run_id, dir=str(folder.root),
            settings={"console": "off"},  # the panel is drawn many times a second
            **common,
        )  # fmt: skip


class _TensorBoard:
    """TensorBoard behind the interface of W&B's run."""

    def __init__(self, folder: RunFolder, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier files hold of this step and the ones after it.
        self._writer: Any = SummaryWriter(str(folder.root / "tensorboard"), purge_step=step)
        self.finish = self._writer.close

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
