"""A command that trains on examples, from its settings to its report."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.capacity import available_cores
from agentrl.config.checks import check_warmup
from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig
from agentrl.config.field_types import split_step
from agentrl.config.secrets import as_recorded
from agentrl.config.setting_names import flattened
from agentrl.console.offline import OfflineDisplay, offline_report
from agentrl.console.output import print_block, print_line
from agentrl.interrupts import end_in_order
from agentrl.offline.examples import read_examples
from agentrl.offline.run import (
    OfflineRun,
    OfflineSummary,
    check_examples,
    steps_of_epoch,
    train_offline,
)
from agentrl.runs.circumstances import note_failure, note_start
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import how_to_continue, register
from agentrl.training.resume import go_back, refusal, return_to_start, tell_changes
from agentrl.training.session import RunError
from agentrl.training.setup.clients import local_clients
from agentrl.training.setup.initial_adapters import initial_adapter, new_run
from agentrl_tracer.schemas import Policies
from agentrl_tracer.store import Store
from agentrl_trainer.models.loading import load_facts

_MAY_CHANGE = (
    "data.", "evaluation.", "learning.epochs", "learning.trainers", "learning.shard_base",
    "model.cores", "run.checkpoint_every", "run.keep_checkpoints", "run.keep_adapters",
)  # fmt: skip
"""Beginnings of settings that a resumed run may change. The rest decides what its steps compute;
of ``data`` the examples are compared."""


def run_offline(config: OfflineConfig, resume: Path | None) -> OfflineSummary:
    """Train, and report; ``resume`` is the run that goes on, ``RUN`` or ``RUN@STEP``."""
    config.model.cores = min(config.model.cores or available_cores(), available_cores())
    root, step = split_step(resume) if resume else (None, "")
    folder, changed = (None, {}) if root is None else _begun(root, config)
    facts = load_facts(config.model.name, **config.model.of_tokenizer)
    examples, held_out = read_examples(config, facts)  # before there is a run
    name, learning = config.model.adapter, config.learning
    # Before config.json holds what is refused: every later --resume would fail.
    check_warmup(learning.warmup_steps, steps_of_epoch(config, examples) * learning.epochs)
    if folder is None:
        folder = new_run(config.run, config.kind, learning, [name])
        folder.lock()
    else:
        check_examples(folder, examples, held_out)
        if step:
            go_back(folder, step)
        tell_changes(changed, print_line)
    end_in_order(partial(how_to_continue, folder, config.kind))
    print_line((f"run folder {folder.root}", "dim"))
    with closing(Store(str(folder.store))) as store, OfflineDisplay() as display:
        run_id, _ = register(folder, store, config.kind, config, Policies())
        try:
            torch.set_num_threads(1)  # until the model's size is known
            start = initial_adapter(folder, name) if config.learning.init_adapter else None
            backend = local_clients(
                config.model, config.learning, folder.root, display.note, names=[name],
                seed=config.run.seed, score=isinstance(config, RewardModelConfig),
                reference=start if isinstance(config, PreferConfig) else None,
            )  # fmt: skip
            run = OfflineRun(config, examples, held_out, folder, store, run_id, backend, display)
            note_start(folder, run.steps)
            try:
                summary = train_offline(run)
            except backend.failures as error:
                raise RunError(f"{error}\nContinue with --resume {folder.root}") from error
        except KeyboardInterrupt:
            store.end_run(run_id, "interrupted")
            raise
        except BaseException as error:
            note_failure(folder, error)
            store.end_run(run_id, "failed")
            raise
    print_block(offline_report(folder, summary, config.model))
    return summary


def _begun(resume: Path, config: OfflineConfig) -> tuple[RunFolder, dict[str, tuple[Any, Any]]]:
    """Return the folder of the run that goes on, once nothing else writes there, and the settings
    that differ from its own, each with its old and new value.

    Raises:
        ConfigError: the run's steps depend on a changed setting.
    """
    folder = RunFolder.existing(resume, "resume")
    return_to_start(folder, print_line)
    folder.lock()
    was = flattened(as_recorded(folder.read_config()))
    now = flattened(as_recorded(config.model_dump(mode="json")))
    del now["run.folder"]
    changed = {name: (was.get(name), now[name]) for name in now if was.get(name) != now[name]}
    for name, (before, after) in changed.items():
        if not name.startswith(_MAY_CHANGE):
            raise refusal(folder, name, f"{before}, not {after}", "its steps depend on it")
    return folder, changed
