"""The best adapters of a run, by held-out accuracy or loss: of which step, and their own copy."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.runs.folder import RunFolder, run_and_step
from agentrl.runs.metric_names import HELD_OUT, HELD_OUT_LOSS
from agentrl.runs.recorded import shown


def held_out_of(folder: RunFolder) -> dict[int, float]:
    """Return the held-out accuracies that a run has measured, by step."""
    return {row["step"]: row[HELD_OUT] for row in folder.read_metrics() if HELD_OUT in row}


def held_out_losses_of(folder: RunFolder) -> dict[int, float]:
    """Return the held-out losses that a run on examples has measured, by step."""
    rows = [row for row in folder.read_metrics() if HELD_OUT_LOSS in row]
    return {
        row["step"]: math.inf if row[HELD_OUT_LOSS] is None else row[HELD_OUT_LOSS] for row in rows
    }


def best_step(held_out: Mapping[int, float]) -> int | None:
    """Return the step with the best held-out accuracy, of equal ones the earliest."""
    return min(held_out, key=lambda step: (-held_out[step], step), default=None)


def lowest_loss(losses: Mapping[int, float]) -> int | None:
    """Return the step with the lowest held-out loss, of equal ones the earliest."""
    return best_step({step: -loss for step, loss in losses.items()})


def best_step_of(folder: RunFolder) -> int | None:
    """Return a run's best step, by the held-out measure that it has."""
    accuracies = held_out_of(folder)
    return best_step(accuracies) if accuracies else lowest_loss(held_out_losses_of(folder))


def keep_best(folder: RunFolder, names: Iterable[str], step: int | None) -> None:
    """Make ``adapter-best`` a copy of a step's adapters. It is whole or does not exist."""
    from agentrl_trainer.checkpoint import atomic_folder

    if step is None:
        shutil.rmtree(folder.best_adapter, ignore_errors=True)
        return
    names = list(names)
    sources = {name: folder.adapter_version(name, step) for name in names}
    if not all(source.is_dir() for source in sources.values()):
        return  # the user has deleted that version: the copy is the last one
    with atomic_folder(folder.best_adapter) as staging:
        for name, place in folder.layout(staging, names).items():
            shutil.copytree(sources[name], place, dirs_exist_ok=True)


def which_adapter(source: str | Path | None, found: Mapping[str, Path]) -> str | None:
    """Say of which step a run's adapters are, and which are better; None for other adapters.

    Args:
        source: what the user gave, for instance ``runs/hello``.
        found: the adapters' folders.
    """
    if source is None:
        return None
    run, step = run_and_step(source)
    if not run.config.is_file():
        return None
    accuracies, losses = held_out_of(run), held_out_losses_of(run)
    what = "accuracy" if accuracies else "loss"
    better = accuracies or {step: -loss for step, loss in losses.items()}
    said_of = {s: f"{x:.1%}" if accuracies else f"{-x:.4f}" for s, x in better.items()}
    best = best_step(better)
    versions = {int(path.name[1:]) for path in found.values() if path.name[1:].isdigit()}
    at = best if step == "best" else max(versions, default=None)
    if at is None:
        return None
    which = {"": "newest adapter,", "best": "best adapter,"}.get(step, "adapter")
    said = f"{shown(run.root)}: the {which} of step {at}"
    if at in said_of:
        said += f", held-out {what} {said_of[at]}"
    if best is not None and best != at and better[best] > better.get(at, -math.inf):
        said += (
            f"; the best was {said_of[best]} at step {best}: --adapter-path {shown(run.root)}@best"
        )
    return said
