"""What the commands share that train on examples: the run folder, its store, and the ending."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from os import getcwd
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from agentrl.capacity import available_cores
from agentrl.config.checks import check_warmup
from agentrl.config.commands import OfflineConfig
from agentrl.config.errors import ConfigError
from agentrl.config.secrets import as_recorded
from agentrl.config.setting_names import flag_of, flattened
from agentrl.console.offline import OfflineDisplay, offline_report
from agentrl.console.output import console, print_block, print_line
from agentrl.interrupts import end_in_order
from agentrl.runs.circumstances import note_failure, note_start
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import how_to_continue
from agentrl.timing import heavy_imports
from agentrl.training.resume import return_to_start, tell_changes
from agentrl.training.setup.initial_adapters import find_initial, initial_adapter
from agentrl_tracer.schemas import Policies
from agentrl_tracer.store import Store

if TYPE_CHECKING:
    from agentrl.offline.objective import Objective
    from agentrl.offline.run import OfflineSummary
    from agentrl_trainer.models.loading import ModelFacts

E = TypeVar("E")

_MAY_CHANGE = ("evaluation.", "run.", "model.cores", "learning.epochs", "data.")
"""Beginnings of settings that a resumed run may change. The rest decides what its steps compute;
of ``data`` the examples are compared."""
_MAY_NOT_CHANGE = ("run.seed", "run.name")


@dataclass(frozen=True, slots=True)
class Prepared(Generic[E]):
    """What a run learns, and from what."""

    objective: Objective[E]
    examples: Sequence[E]
    held_out: Sequence[E]
    scores: bool = False
    """Whether the adapter is a reward model."""
    refers: bool = False
    """Whether the adapter is compared with what it starts from."""


def run_offline(
    config: OfflineConfig,
    resume: Path | None,
    kind: str,
    prepare: Callable[[ModelFacts], Prepared[E]],
) -> OfflineSummary:
    """Run a command that trains on examples, from its settings to its report.

    Args:
        resume: the folder of the run that goes on.
        kind: of the run, which is the command's name.
        prepare: reads the examples, given the tokenizer and the context length of the model. It is
            called before there is a run, and says what is wrong with them as ConfigError.
    """
    config.model.cores = min(config.model.cores or available_cores(), available_cores())
    folder = None if resume is None else _begun(resume, config)
    with heavy_imports():
        from agentrl_trainer.models.loading import load_facts

    how = {"trust_remote_code", "chat_template"}
    facts = load_facts(config.model.name, **config.model.model_dump(include=how))
    prepared = prepare(facts)
    if folder is None:
        initial = find_initial(config.learning, [config.model.adapter], config.model.name)
        folder = RunFolder.create(config.run.folder, config.run.name, kind)
        folder.lock()
        if initial is not None:
            initial.keep(folder)
            print_line((initial.told, "dim"))
    end_in_order(partial(how_to_continue, folder, kind))
    print_line((f"run folder {folder.root}", "dim"))
    with _registered(folder, config, kind) as (store, run_id), OfflineDisplay(console) as display:
        summary = _train(config, folder, store, run_id, display, prepared)
    print_block(offline_report(summary, config.model))
    return summary


def _begun(resume: Path, config: OfflineConfig) -> RunFolder:
    """Return the folder of the run that goes on, once nothing else writes there."""
    folder = RunFolder.existing(resume, "resume")
    return_to_start(folder, print_line)
    folder.lock()
    tell_changes(_changes(folder, config), print_line)
    return folder


def _changes(folder: RunFolder, config: OfflineConfig) -> dict[str, tuple[object, object]]:
    """Return the settings that differ from the run's, each with its old and new value.

    Raises:
        ConfigError: the run's steps depend on a changed setting.
    """
    was = flattened(as_recorded(folder.read_config()))
    now = flattened(as_recorded(config.model_dump(mode="json")))
    changed = {name: (was.get(name), now[name]) for name in now if was.get(name) != now[name]}
    for name, (before, after) in changed.items():
        if not name.startswith(_MAY_CHANGE) or name in _MAY_NOT_CHANGE:
            raise ConfigError(
                f"{name}: {folder.root} was started with {before}, not {after}. This cannot "
                f"change, because its steps depend on it: leave {flag_of(name)} as it was, or "
                "start a new run"
            )
    return {name: one for name, one in changed.items() if name != "run.folder"}


@contextmanager
def _registered(folder: RunFolder, config: OfflineConfig, kind: str) -> Iterator[tuple[Store, str]]:
    """Lend the run's store and its id, new or as the folder has it; note there how it ends."""
    settings = as_recorded(config.model_dump(mode="json"))
    with closing(Store(str(folder.store))) as store:
        if folder.exists():
            run_id = folder.run_id.read_text().strip()
            store.resume_run(run_id, settings, Policies())
        else:
            run_id = store.create_run(folder.name, kind, settings)
            folder.write(folder.started_in, getcwd())
            folder.write(folder.run_id, run_id)
        folder.write_json(folder.config, settings)
        try:
            yield store, run_id
        except KeyboardInterrupt:
            store.end_run(run_id, "interrupted")
            raise
        except BaseException as error:
            note_failure(folder, error)
            store.end_run(run_id, "failed")
            raise


def _train(
    config: OfflineConfig,
    folder: RunFolder,
    store: Store,
    run_id: str,
    display: OfflineDisplay,
    prepared: Prepared[E],
) -> OfflineSummary:
    with heavy_imports():
        import torch

        from agentrl.offline.run import OfflineRun, train_offline
        from agentrl.training.setup.clients import local_clients

    torch.set_num_threads(1)  # until the model's size is known
    name = config.model.adapter
    start = initial_adapter(folder, name) if prepared.refers else None
    backend = local_clients(
        config.model, config.learning, folder.root, display.note,
        names=[name], seed=config.run.seed, score=prepared.scores, reference=start,
    )  # fmt: skip
    run = OfflineRun(
        config, prepared.objective, prepared.examples, prepared.held_out, folder, store, run_id,
        backend, display,
    )  # fmt: skip
    check_warmup(config.learning.warmup_steps, run.steps)
    note_start(folder, run.steps)
    return train_offline(run)
