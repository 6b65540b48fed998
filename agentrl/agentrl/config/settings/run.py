"""A run: where it keeps its data, how long it is, and what ends it early."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.config.field_types import Count, Positive, Store, Table, Whole, from_names
from agentrl_trainer.names import check_name

Readers = Literal["owner", "group", "everyone"]

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]

Trackers = Annotated[list[Tracker], BeforeValidator(from_names)]


class RunFolderSettings(Table):
    """Where a run keeps its data, and its seed."""

    folder: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: Whole = 0
    """Seed of everything random."""


class NewRunSettings(RunFolderSettings):
    name: Annotated[str, AfterValidator(check_name)] | None = None
    """Name of the run and its folder."""


class TrainRunSettings(NewRunSettings):
    steps: Count | None = None
    """Optimizer steps; by default one pass over the tasks."""
    backend: Literal["local", "verl", "tinker"] = "local"
    """What trains: this machine, verl's workers on Ray, or Tinker. Tinker also samples, and needs
    the extra `tinker` and TINKER_API_KEY. verl needs an environment of its own."""
    store: Store | None = None
    """Store: a path or PostgreSQL URL; by default a file in the run folder. os.environ/NAME stands
    for a password in the environment: postgresql://me:os.environ/NAME@host/agentrl."""
    trackers: Trackers = Field(default_factory=list[Tracker])
    """Experiment trackers that also get metrics and samples; packages of their own."""
    group: Annotated[str, AfterValidator(check_name)] | None = None
    """Group of runs that this one belongs to, such as a sweep; trackers show it."""
    adapter_readers: Readers = "owner"
    """Who may read the adapters: another user's vLLM server needs group or everyone. The group is
    that of the folder that holds the run."""
    keep_checkpoints: Count = 3
    """Newest checkpoints to keep."""
    keep_adapters: Annotated[int, Field(ge=4)] | None = None
    """Newest versions of each adapter to keep; by default all. Versions that were evaluated, those
    of kept checkpoints, and folders that hold a file named keep stay."""
    ui: bool = False
    """Show the run in a browser while it trains. Starts `agentrl ui` beside it, prints its link."""
    keep_logs: Count = 1000
    """Newest logs of attempts to keep; those of unfinished rollouts stay, too."""


class ServeRunSettings(Table):
    store: Store = "runs/serve.db"
    """Where calls are recorded: a path or PostgreSQL URL."""


class GuardSettings(Table):
    """Limits of a run, and what follows when it collapses. ``evaluation`` has those of success."""

    max_hours: Positive | None = None
    """Hours that the run may take, those before a --resume included. It ends before a step that
    would not fit."""
    max_run_tokens: Count | None = None
    """Tokens that the models in training may read and sample in the run. Evaluations count, too;
    the run ends before a step that would not fit."""
    max_cost: Positive | None = None
    """US dollars that calls of other models may cost, by LiteLLM's prices. The run ends
    before a step that would not fit."""
    on_collapse: Literal["note", "stop", "roll_back"] = "note"
    """When an alert says that the run collapses: show it; stop; or go back to the step with the
    best held-out accuracy and go on with half the learning rate."""
    roll_backs: Whole = 2
    """With roll_back: how often; the next collapse stops the run."""
