"""Experiment trackers beside ``metrics.jsonl`` and the store: TensorBoard, W&B, trackio.

Optional packages, imported only when asked for. A tracker that fails is given up with a note: it
must never end a run.

Of a run that is resumed, what was logged after its checkpoint happens again. TensorBoard forgets
it; W&B and trackio keep what they were told first (for a synchronous run the same numbers).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder

TrackerName = Literal["tensorboard", "wandb", "trackio"]


MAY_HOLD_SECRETS: dict[str, Any] = {
    "run": {"store"},
    "models": True,
    "sampler": {"vllm": {"url"}},
    "gateway": {"forward_otlp"},
}
"""Settings with URLs or parameters that people put passwords into: no tracker gets them."""


class Tracker(Protocol):
    forgets: bool
    """Whether it can be made to forget what a resumed run repeats; else it is not told again."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The trackers of a run; ``note`` is told of one that fails.

    Raises:
        ConfigError: one is asked for whose package is not installed.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        folder: RunFolder,
        settings: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        for name in names:
            _require(name)
        self._names = names
        self._folder = folder
        self._settings = settings
        self._note = note
        self._open: dict[str, Tracker] = {}
        self._told: dict[int, set[str]] = {}

    def begin(self, step: int | None = None, told: Sequence[Mapping[str, Any]] = ()) -> None:
        """Opens them.

        Args:
            step: the one a resumed run goes on after; None for a new run. Rows of it are told once
                more, to those that forget: its process may have died while it told them.
            told: the rows that were logged before, those of repeated steps among them.
        """
        for row in told:
            self._told.setdefault(int(row["step"]), set()).update(row)
        for name in self._names:
            self._guard(name, lambda name=name: self._begin(name, step))
        for row in told:
            if row["step"] == step:
                self.log(int(row["step"]), row)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Finite numbers only; the step itself is the axis."""
        values = {
            name: float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        news = {k: v for k, v in values.items() if k not in self._told.get(step, ())}
        for name, tracker in list(self._open.items()):
            if told := values if tracker.forgets else news:
                self._guard(name, lambda tracker=tracker, told=told: tracker.log(step, told))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close)

    def _begin(self, name: str, step: int | None) -> None:
        self._open[name] = _KINDS[name](self._folder, self._settings, step)

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a tracker's server may be away
            self._open.pop(name, None)
            self._note(f"tracker {name} was given up: {type(error).__name__}: {error}")


class _TensorBoard:
    forgets = True

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier files hold of this step and the ones after it.
        where = str(folder.root / "tensorboard")
        self._writer: Any = SummaryWriter(where, purge_step=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    forgets = False  # it ignores steps that have been

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], step: int | None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # The run's own id: a resumed run goes on in the same place.
        self._run: Any = wandb.init(
            project="agentrl", name=folder.name, id=folder.run_id.read_text().strip(),
            resume="allow", dir=str(folder.root), config=dict(settings),
            settings={"console": "off"},  # our panel is drawn anew many times a second
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    forgets = False

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], step: int | None) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # It resumes by name, and a folder's name may be another run's as well.
        name = f"{folder.name}-{folder.run_id.read_text().strip()[-8:]}"
        self._run: Any = trackio.init(
            project="agentrl", name=name, resume="allow", config=dict(settings), embed=False,
            auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[RunFolder, Mapping[str, Any], int | None], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def _require(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"run.trackers: {name} cannot be imported ({error}); "
            f"`pip install 'agentrl[{name}]'`, or leave it out"
        ) from error
