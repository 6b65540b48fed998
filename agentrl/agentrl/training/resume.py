"""Check the settings of a resumed run: which may change, and which its state depends on.

Loads no torch: a run that cannot be resumed is refused at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agentrl.config.commands import OfflineConfig, TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.field_types import is_generator
from agentrl.config.secrets import as_recorded, without_variables
from agentrl.config.setting_names import flag_of, flattened
from agentrl.runs.best_adapter import best_step_of
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError

_SUPERSEDED = "superseded-"  # as agentrl_trainer.checkpoint has it, which would import torch
_SAME_MODEL = " (the same model in another place? write that into config.json)"
_STATE: dict[str, str] = {
    "model.name": f"its adapter fits no other model{_SAME_MODEL}",
    "model.load_in_4bit": "its adapter was learned on that base model",
    "run.backend": "its weights and optimizer are there",
    "learning.rank": "its adapter has that rank",
    "learning.alpha": "its adapter is scaled by it",
    "learning.init_adapter": "its adapter started from there",
    "adapters": "its weights and optimizer are of these",
    "algorithm.estimator": "only gae keeps a value function beside its adapter",
    "run.seed": "its order of tasks follows from it",
    "run.store": "its rollouts are there",
    "run.name": "its folder has that name",
}
"""Settings that may not change, and why."""
_ELSEWHERE = ("agent.tasks", "evaluation.tasks", "run.folder")
"""Files and folders that may be in another place now."""


def return_to_start(folder: RunFolder, tell: Callable[[str], None]) -> None:
    """Make the directory where the run was started the working directory.

    The relative paths of its settings, of its agent and of what that reads begin there.
    """
    if not folder.started_in.is_file():  # an earlier version started the run
        return
    start = Path(folder.started_in.read_text())
    if start == Path.cwd():
        return
    try:
        os.chdir(start)
        tell(f"working directory {start}, where the run was started")
    except OSError as error:
        tell(
            f"the run was started in {start}, which is not here ({error.strerror}): its relative "
            "paths are taken from the working directory"
        )


def go_back(folder: RunFolder, step: str) -> None:
    """Have the run continue after an earlier step: put what it made later aside.

    Args:
        step: a number, or ``best``.

    Raises:
        ConfigError: no checkpoint of that step is kept.
    """
    checkpoint = checkpoint_of(folder, step, "resume")
    [(after, _)] = _numbered([checkpoint])
    store, run = open_store(folder)
    with contextlib.closing(store):  # first: a gateway loads the newest adapters that it names
        store.drop_adapters_after(run["id"], after)
    made = (*folder.checkpoints.glob("step-*"), *folder.adapters.glob("*/v*"))
    for at, path in _numbered(made):
        if at > after:
            path.rename(path.with_name(f"{_SUPERSEDED}{path.name}-{secrets.token_hex(4)}"))


def checkpoint_of(run: RunFolder, step: str, field: str) -> Path:
    """Return the checkpoint of a step, a number or ``best``; ``field`` is the setting's name.

    Raises:
        ConfigError: it is not kept.
    """
    kept = {str(at): path for at, path in _numbered(run.checkpoints.glob("step-*"))}
    at = step.lstrip("0") or "0"
    if step == "best":
        if (best := best_step_of(run)) is None:
            raise ConfigError(f"{field}: {run.root} was never evaluated, so no step is its best")
        at = str(best)
    if at not in kept:
        raise ConfigError(
            f"{field}: {run.root} has no checkpoint of step {at}; kept are those of: "
            f"{', '.join(kept) or 'none'}. Give one of them as RUN@STEP"
        )
    return kept[at]


def _numbered(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    numbers = ((path.name.removeprefix("step-").removeprefix("v"), path) for path in paths)
    return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def tasks_kept(folder: RunFolder) -> int:
    """Return how many training tasks the store of a run holds."""
    store, run = open_store(folder)
    with contextlib.closing(store):
        return len(store.tasks(run["id"], "train"))


def check_resume(
    folder: RunFolder, config: TrainConfig, tasks: Sequence[Json], eval_tasks: Sequence[Json]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the run's, each with its old and new value.

    Raises:
        ConfigError: the run's weights, optimizer or records depend on a changed setting.
    """
    was, now = (
        flattened(as_recorded(folder.read_config())),
        flattened(as_recorded(config.model_dump(mode="json"))),
    )
    for name, why in _STATE.items():
        before, after = _compared(name, was), _compared(name, now)
        if not _same(name, before, after):
            if name == "adapters" and not config.adapters:
                name = "model.adapter"
            raise refusal(folder, name, f"{_shown(before)}, not {_shown(after)}", why)
    # Earlier rollouts name their task by its place in the file.
    store, run = open_store(folder)
    with contextlib.closing(store):
        stored = {split: store.tasks(run["id"], split) for split in ("train", "eval")}
    for name, before, given in (
        ("agent.tasks", stored["train"], tasks),
        ("evaluation.tasks", stored["eval"], eval_tasks),
    ):
        if is_generator(str(now[name])):  # it is asked for as many as the run takes
            before, given = before[: len(given)], given[: len(before)]
        if before and before != list(given):
            differ = [old != new for old, new in zip(before, given, strict=False)]
            difference = (
                f"{len(before)} tasks of {was.get(name)}, not the {len(given)} that are in "
                f"{now[name]} now"
            )
            if any(differ):
                difference += f" (the first that differs is number {differ.index(True) + 1})"
            raise refusal(folder, name, difference, "its rollouts belong to them")
    return {
        name: (was.get(name), value)
        for name, value in now.items()
        if name not in _ELSEWHERE and was.get(name, value) != value
    }


def _compared(name: str, settings: Mapping[str, Any]) -> Any:
    if name == "adapters":  # their names; which agents and rewards train them may change
        return sorted(settings.get("adapters") or [settings["model.adapter"]])
    return settings.get(name)


def _same(name: str, before: Any, after: Any) -> bool:
    if name == "model.name" and before != after:
        here, there = Path(before).expanduser(), Path(after).expanduser()
        return here.is_dir() and there.is_dir() and here.samefile(there)
    if name == "run.store" and before and after:
        if "://" not in before:
            return Path(before).absolute() == Path(after).absolute()
        return without_variables(before) == without_variables(after)  # the same but its password
    if name == "run.backend":  # local and verl keep both in the run's folder
        return before == after or "tinker" not in (before, after)
    if name == "algorithm.estimator" and "gae" not in (before, after):
        return True
    return before == after


def refusal(folder: RunFolder, name: str, difference: str, why: str) -> ConfigError:
    """Return the error of a setting that may not change."""
    return ConfigError(
        f"{name}: {folder.root} was started with {difference}. This cannot change, because {why}: "
        f"leave {flag_of(name)} as it was, or start a new run"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else str(value)


def tell_changes(changes: Mapping[str, tuple[Any, Any]], tell: Callable[[str], None]) -> None:
    """Report the settings that differ from now on, also for later ``--resume``."""
    if changes:
        words = ", ".join(
            f"{name} {'default' if old is None else old} → {new}"
            for name, (old, new) in changes.items()
        )
        tell(f"from now on: {words}")


def tell_other_counts(
    step: int,
    meta: Mapping[str, Any],
    config: TrainConfig | OfflineConfig,
    tell: Callable[[str], None],
) -> None:
    """Report that other trainers or cores wrote the checkpoint ``step``, whose meta this is."""
    counts = {"learning.trainers": config.learning.trainers, "model.cores": config.model.cores}
    for name, now in counts.items():
        before = meta.get(name.rpartition(".")[2], now)  # an earlier version's does not say
        if before != now:
            tell(
                f"step {step} was computed with {name} {before}, the next ones with {now}: they "
                "may round sums otherwise, so what follows need not equal bit for bit what the run "
                f"would have computed before; {flag_of(name)} {before} would"
            )


def verify_in_background(store: Store, run_id: str, note: Callable[[str], None]) -> None:
    """Count the run's calls while it goes on, and note what does not add up."""

    def verify() -> None:
        with contextlib.suppress(StoreError):  # the run itself will say so
            if fault := store.verify(run_id).fault:
                note(f"the run's calls do not add up: {fault}")

    threading.Thread(target=verify, name="verify-calls", daemon=True).start()
