"""Rollouts of a model that does not train, recorded in a run folder of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.progress import Progress

from agentrl.config.commands import EvalConfig, RunConfig
from agentrl.config.settings import AdapterSettings
from agentrl.console.output import console, print_sentences
from agentrl.interrupts import end_in_order
from agentrl.runs.best_adapter import which_adapter
from agentrl.runs.folder import RunFolder, adapter_folders
from agentrl.training.session import Session
from agentrl_tracer.schemas import Call, Json, NewRollout, Rollout, SkipReason


def execute(
    config: EvalConfig | RunConfig,
    kind: str,
    tasks: Sequence[Json],
    plan: Callable[[list[str]], Sequence[NewRollout]],
    asks_for: str | None,
) -> tuple[Session, list[Rollout], list[Call]]:
    """Execute rollouts with the model or the adapters that the settings name.

    Returns the session, whose store the caller closes, the rollouts and their calls.

    Args:
        kind: ``eval`` or ``run``.
        plan: returns the rollouts of tasks, which it gets by their ids.
        asks_for: the model that the agent is told to ask for; by default the run's own.
    """
    adapters = adapter_folders(config, config.model.adapter_path)
    if said := which_adapter(config.model.adapter_path, adapters):
        print_sentences(said)
    config.adapters = config.adapters or {name: AdapterSettings() for name in adapters}
    folder = RunFolder.create(config.run.folder, None, kind)
    session = Session(folder, config, kind, adapter_paths=adapters, asks_for=asks_for)
    end_in_order(lambda: f"recorded so far: {folder.root}")
    store = session.store
    planned = plan(store.add_tasks(session.run_id, kind, tasks))
    with session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(planned))
        session.wait_ready(print_sentences)
        rollouts = session.execute(
            planned,
            lambda done, _: progress.update(bar, completed=done, description="rollouts"),
        )
        session.tell_lost_spans(print_sentences, last=True)
    calls = session.skip_calls([rollout.id for rollout in rollouts], SkipReason.EVALUATION)
    store.end_run(session.run_id, "finished")
    return session, rollouts, calls
