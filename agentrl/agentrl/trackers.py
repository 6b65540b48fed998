"""Experiment trackers beside ``metrics.jsonl`` and the store: TensorBoard, W&B, trackio.

Optional packages, imported only when asked for. A tracker that fails is given up with a note: it
must never end a run.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from agentrl.config import ConfigError
from agentrl.run_folder import RunFolder

TrackerName = Literal["tensorboard", "wandb", "trackio"]


MAY_HOLD_SECRETS = frozenset({"store", "models", "vllm_url", "forward_otlp"})
"""Settings with URLs or parameters that people put passwords into: no tracker gets them."""


class Tracker(Protocol):
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
        self._note = note
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._guard(name, lambda name=name: self._begin(name, folder, settings))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Finite numbers only; the step itself is the axis."""
        values = {
            name: float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, tracker in list(self._open.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(step, values))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close)

    def _begin(self, name: str, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self._open[name] = _KINDS[name](folder, settings)

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a tracker's server may be away
            self._open.pop(name, None)
            self._note(f"tracker {name} was given up: {type(error).__name__}: {error}")


class _TensorBoard:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder.root / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # The run's own id: a resumed run goes on in the same place.
        self._run: Any = wandb.init(
            project="agentrl", name=folder.name, id=folder.run_id.read_text().strip(),
            resume="allow", dir=str(folder.root), config=dict(settings),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run: Any = trackio.init(
            project="agentrl", name=folder.name, resume="allow", config=dict(settings)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[RunFolder, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def _require(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"trackers: {name} cannot be imported ({error}); `pip install {name}`, or leave it out"
        ) from error
