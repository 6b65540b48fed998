"""Rollouts of a model that does not train, recorded in a run folder of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from agentrl.config.commands import CheckConfig, EvalConfig, RunConfig
from agentrl.config.settings.models import AdapterSettings
from agentrl.console.output import console, print_sentences
from agentrl.gateway.handle import fetch_model
from agentrl.interrupts import end_in_order
from agentrl.runs.best_adapter import which_adapter
from agentrl.runs.circumstances import note_start
from agentrl.runs.folder import RunFolder, adapter_folders
from agentrl.scoring.functions import RewardFunction
from agentrl.scoring.scorer import Scorer
from agentrl.training.session import Session
from agentrl.training.setup.initial_adapters import find_initial
from agentrl_tracer.schemas import Call, Json, NewRollout, Rollout, SkipReason


@dataclass(slots=True)
class FixedModel:
    """What executes rollouts."""

    session: Session
    scorer: Scorer
    task_ids: list[str]
    progress: Progress
    calls: list[Call] = field(default_factory=list[Call])
    """Of all rollouts, in the end."""

    def execute(self, planned: Sequence[NewRollout]) -> list[Rollout]:
        bar = self.progress.add_task("rollouts", total=len(planned))

        def show(done: int, total: int) -> None:
            self.progress.update(bar, completed=done, total=total)

        rollouts = self.session.execute(planned, show)
        self.progress.update(bar, description="rewards")
        self.scorer.score(rollouts, show)
        self.progress.remove_task(bar)
        return rollouts


@contextlib.contextmanager
def fixed_model(
    config: CheckConfig | EvalConfig | RunConfig, kind: str, tasks: Sequence[Json],
    asks_for: str | None = None, rewards: Sequence[RewardFunction] = (),
    source: str | Path | None = None,
) -> Iterator[FixedModel]:  # fmt: skip
    """Run gateway and runners with the model or the adapters that the settings name.

    The caller closes the session's store, which can be read afterwards.

    Args:
        kind: ``check``, ``eval`` or ``run``.
        asks_for: the model that the agent is told to ask for; by default the run's own.
        rewards: are computed when rollouts have finished.
        source: the adapters, as ``find_adapters`` takes them; by default the base model. A check
            has what its training starts from.
    """
    if isinstance(config, CheckConfig):
        loras = find_initial(config.learning, list(config.trained))
        adapters = {name: one.folder for name, one in loras.items()}
    else:
        adapters = adapter_folders(config, source)
        if said := which_adapter(source, adapters):
            print_sentences(said)
        config.adapters = config.adapters or {name: AdapterSettings() for name in adapters}
    fetch_model(config)
    folder = RunFolder.create(config.run.folder, None, kind)
    note_start(folder)
    session = Session(folder, config, kind, adapter_paths=adapters, asks_for=asks_for)
    end_in_order(lambda: f"recorded so far: {folder.root}")
    with session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        session.wait_ready(print_sentences)
        progress.remove_task(bar)
        scorer = session.scorer(rewards, print_sentences)
        task_ids = session.store.add_tasks(session.run_id, kind, tasks)
        made = FixedModel(session, scorer, task_ids, progress)
        yield made
        if counted := scorer.take_metrics():
            print_sentences(", ".join(f"{name} {value:g}" for name, value in counted.items()))
        scorer.close()
        session.tell_lost_spans(print_sentences, last=True)
    ids = [rollout.id for rollout in session.store.rollouts(session.run_id)]
    made.calls = session.skip_calls(ids, SkipReason.EVALUATION)
    session.store.end_run(session.run_id, "finished")
