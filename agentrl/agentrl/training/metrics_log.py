"""Write each row of metrics once: ``metrics.jsonl``, the store, TensorBoard, W&B, trackio.

Trackers are optional packages, imported only when configured. One that fails is given up with a
note: it never ends a run. After a resume, TensorBoard drops the steps that are made again; W&B and
trackio keep what they were told first (the same numbers, for a synchronous run).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.training.metrics import finite_numbers
from agentrl_tracer.store import Store

_MAY_HOLD_SECRETS: dict[str, Any] = {
    "run": {"store"},
    "models": True,
    "sampler": {"vllm": {"url"}},
    "gateway": {"forward_otlp"},
}
"""Settings with URLs or parameters that may hold passwords: no tracker gets them."""


@dataclass
class MetricsLog:
    """The metrics of one run.

    Raises:
        ConfigError: the package of a configured tracker is not installed.
    """

    config: TrainConfig
    folder: RunFolder
    store: Store
    run_id: str
    note: Callable[[str], None]
    """Receives a message when a tracker fails."""

    def __post_init__(self) -> None:
        settings = self.config.model_dump(mode="json", exclude=_MAY_HOLD_SECRETS)
        self._trackers = Trackers(self.config.run.trackers, self.folder, settings, self.note)
        self.close = self._trackers.close
        self.rows = self.folder.read_metrics

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self.folder.append_metrics(row)
        self.store.log_metrics(self.run_id, step, finite_numbers(row))
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
        self.folder.keep_metrics(lambda row: row["step"] <= step)
        self.store.drop_metrics_after(self.run_id, step)
        self._trackers.begin(step if rows else None, rows)
        of_step = [row for row in rows if row["step"] == step]
        for row in of_step:  # the process may have died between the file and the store
            self.store.log_metrics(self.run_id, step, finite_numbers(row))
        if checkpointed is not None and not any(REWARD in row for row in of_step):
            self.log(step, checkpointed)


class _Tracker(NamedTuple):
    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]
    forgets: bool
    """Whether it drops what a resumed run repeats; one that does not is not told again."""


@dataclass(slots=True)
class Trackers:
    """The trackers of a run.

    Raises:
        ConfigError: the package of a configured tracker is not installed.
    """

    names: Sequence[str]
    folder: RunFolder
    settings: dict[str, Any]
    note: Callable[[str], None]
    """Receives a message when a tracker fails."""
    _open: dict[str, _Tracker] = field(default_factory=dict[str, _Tracker])
    _told: dict[int, set[str]] = field(default_factory=dict[int, set[str]])

    def __post_init__(self) -> None:
        for name in self.names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"run.trackers: {name} cannot be imported ({error}); "
                    f"`pip install {name}`, or leave it out"
                ) from error

    def begin(self, step: int | None = None, told: Sequence[Mapping[str, Any]] = ()) -> None:
        """Open the trackers.

        Args:
            step: the one that a resumed run continues after; None for a new run. Its rows are told
                again to trackers that forget: the process may have died while it told them.
            told: the rows that were logged before, those of repeated steps among them.
        """
        for row in told:
            self._told.setdefault(int(row["step"]), set()).update(row)
        for name in self.names:
            with self._given_up_if_it_fails(name):
                self._open[name] = _OPEN[name](self.folder, self.settings, step)
        for row in told:
            if row["step"] == step:
                self.log(int(row["step"]), row)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log a row's finite numbers; the step itself is the axis."""
        values = {name: value for name, value in finite_numbers(row).items() if name != "step"}
        news = {k: v for k, v in values.items() if k not in self._told.get(step, ())}
        for name, tracker in list(self._open.items()):
            with self._given_up_if_it_fails(name):
                if told := values if tracker.forgets else news:
                    tracker.log(step, told)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._given_up_if_it_fails(name):
                tracker.close()

    @contextmanager
    def _given_up_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker's server may be away
            self._open.pop(name, None)
            self.note(f"tracker {name} was given up: {type(error).__name__}: {error}")


def _tensorboard(folder: RunFolder, _settings: dict[str, Any], step: int | None) -> _Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Readers drop what earlier files hold of this step and the ones after it.
    writer: Any = SummaryWriter(str(folder.root / "tensorboard"), purge_step=step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return _Tracker(log, writer.close, forgets=True)


def _wandb(folder: RunFolder, settings: dict[str, Any], _step: int | None) -> _Tracker:
    import wandb  # pyright: ignore[reportMissingImports]

    # The run's own id: a resumed run continues in the same place.
    return _hosted(wandb.init(
        project="agentrl", name=folder.name, id=folder.run_id.read_text().strip(), resume="allow",
        dir=str(folder.root), config=settings,
        settings={"console": "off"},  # the panel in the terminal is drawn many times a second
    ))  # fmt: skip


def _trackio(folder: RunFolder, settings: dict[str, Any], _step: int | None) -> _Tracker:
    import trackio  # pyright: ignore[reportMissingImports]

    # trackio resumes by name, and another run's folder may have the same one.
    name = f"{folder.name}-{folder.run_id.read_text().strip()[-8:]}"
    return _hosted(trackio.init(
        project="agentrl", name=name, resume="allow", config=settings, embed=False,
        auto_log_cpu=False,
    ))  # fmt: skip


def _hosted(run: Any) -> _Tracker:
    """Log to a run of W&B or of trackio, which has W&B's interface; both ignore earlier steps."""
    return _Tracker(lambda step, values: run.log(dict(values), step=step), run.finish, False)


_OPEN: dict[str, Callable[[RunFolder, dict[str, Any], int | None], _Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
