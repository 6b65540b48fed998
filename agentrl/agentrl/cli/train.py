"""``agentrl train``: train a LoRA adapter for an agent."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from agentrl.capacity import available_cores, choose_runners
from agentrl.cli import Tokens
from agentrl.cli.tasks import read_tasks, training_tasks
from agentrl.config.checks import check_warmup
from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.field_types import split_step
from agentrl.config.loading import load, resume_of, steps_of
from agentrl.console.live import TrainDisplay
from agentrl.console.output import console, print_block, print_line
from agentrl.console.report import serve_command, training_report
from agentrl.gateway.handle import fetch_model
from agentrl.interrupts import end_in_order
from agentrl.runner.agent_spec import validate_agent
from agentrl.runs.circumstances import note_start
from agentrl.runs.folder import RunFolder, how_to_fetch
from agentrl.runs.recorded import SHELL_IN, how_to_continue, open_store
from agentrl.runs.summary import Summary
from agentrl.scoring.functions import RewardFunction, load_functions
from agentrl.supervisor import SupervisedProcess
from agentrl.timing import heavy_imports
from agentrl.training.queue.curriculum import Curriculum
from agentrl.training.resume import check_resume, go_back, return_to_start, tell_changes
from agentrl.training.session import Session
from agentrl.training.setup.initial_adapters import new_run
from agentrl.training.setup.own_functions import add_own_loss, own_estimator
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import StoreError

if TYPE_CHECKING:
    from agentrl.training.loop import Trainer


def train_command(*tokens: Tokens) -> None:
    """Train a LoRA adapter for an agent.

    Each step runs the agent on tasks, compares the rewards that it emits, updates the adapter, and
    loads it into the sampler. Training runs on this machine, with torch and PEFT, or elsewhere with
    --backend verl (docs/scale.md) or --backend tinker (docs/client.md).
    """
    config, summary = _train(tokens)
    folder = summary.folder
    print_block(training_report(summary))
    again = summary.ended.again if summary.ended else ()
    if summary.ended and summary.ended.rolls_back:
        _go_on(again)
    if summary.learned_nothing:  # for scripts that wait for a better adapter
        sys.exit(1)
    adapters = {"it": folder.adapter}
    if summary.best is not None and summary.best[1] > summary.held_out[-1][1]:
        adapters["the best"] = folder.best_adapter
    for which, adapter in adapters.items():
        fetched = how_to_fetch(adapter)
        for command in fetched or [serve_command(adapter, config.model)]:
            what = f"{which} is on Tinker; fetch it" if fetched else f"serve {which}"
            print_line(f"{what}:  ", (command, "bold cyan"))
    if again:
        print_line("go on from the best step:  ", (shlex.join(["agentrl", *again]), "bold cyan"))


def train(*arguments: str, trainer: type[Trainer] | None = None) -> Summary:
    """Train as ``agentrl train`` does with these arguments, and return how it ended.

    A run that collapses ends, with ``guards.on_collapse = "roll_back"`` too: ``ended.again`` of the
    summary are the arguments of ``agentrl`` that go back.

        agentrl.train("agent.py:agent", "--tasks", "train.jsonl", "--steps", "20", trainer=Mine)

    Args:
        trainer: a subclass of ``agentrl.Trainer``, to replace stages of the training.

    Raises:
        ConfigError: names each setting that is wrong, and the fix.
        RunError: the run cannot go on, for the reason that the message gives.
    """
    with contextlib.chdir("."):  # a run that goes on does so where it was started
        _, summary = _train(arguments, trainer)
    if summary.ended and summary.ended.rolls_back:
        # Its caller goes back, or not. A store that is away just now must not take the summary.
        with contextlib.suppress(ConfigError, StoreError):
            store, run = open_store(summary.folder)
            with contextlib.closing(store):
                store.end_run(run["id"], "finished")
    return summary


def _train(
    arguments: Sequence[str], trainer: type[Trainer] | None = None
) -> tuple[TrainConfig, Summary]:
    config, resume = load(TrainConfig, arguments), resume_of(arguments)
    config.model.cores = min(config.model.cores or available_cores(), available_cores())
    root, step = split_step(resume) if resume else (None, "")
    folder = None if root is None else RunFolder.existing(root, "resume")
    if folder is not None:
        return_to_start(folder, print_line)
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    rewards = load_functions(config.rewards)
    tasks = training_tasks(config, folder)
    held_out = config.evaluation.tasks
    eval_tasks = read_tasks(held_out, "evaluation.tasks", config.agent) if held_out else []
    # Before config.json holds the setting: every later --resume would fail.
    steps = steps_of(config, tasks)
    check_warmup(config.learning.warmup_steps, steps)
    add_own_loss(config)
    own_estimator(config)
    Curriculum(config, tasks)  # which refuses tasks without weights
    fetch_model(config)
    begun = folder or new_run(config.run, "train", config.learning, list(config.trained))
    with begun.held():
        if folder is not None:
            changes = check_resume(folder, config, tasks, eval_tasks)
            if step:
                go_back(folder, step)
            tell_changes(changes, print_line)
        note_start(begun, steps)
        return config, _execute(config, begun, tasks, eval_tasks, rewards, trainer)


def _execute(
    config: TrainConfig, folder: RunFolder, tasks: Sequence[Json], eval_tasks: Sequence[Json],
    rewards: Sequence[RewardFunction], trainer: type[Trainer] | None,
) -> Summary:  # fmt: skip
    how = config.rollouts
    end_in_order(partial(how_to_continue, folder))
    print_line((f"run folder {folder.root}", "dim"))
    if why := choose_runners(config, how.batch_size * how.group_size):
        print_line((why, "dim"))
    print_line((f"loading {config.model.name}, the gateway and the runners", "dim"))
    with (
        _pages(config, folder) as pages,
        Session(folder, config, "train") as session,
        # After the session, which may fork: the display has a thread.
        TrainDisplay(console, f"agentrl · {folder.name}", since=session.started) as display,
    ):
        if pages is not None:
            pages.supervise()
        if command := session.how_to_join():
            print_line(f"more runners can join:  {command}")
        with heavy_imports():
            from agentrl.training.loop import Trainer

        made = (trainer or Trainer)(config, tasks, eval_tasks, session, display, rewards)
        return made.train()


@contextlib.contextmanager
def _pages(config: TrainConfig, folder: RunFolder) -> Iterator[SupervisedProcess | None]:
    if not config.run.ui:
        yield None
        return
    from agentrl.ui.process import pages_beside

    with pages_beside(folder.root.parent, folder.logs / "ui.log") as (process, link):
        print_line(f"the run in a browser:  {link}")
        yield process


def _go_on(arguments: Sequence[str]) -> NoReturn:
    """Execute another command in place of this process, as the user could in the shell.

    A trial of a sweep stays one, which ends with its sweep.
    """
    sys.stdout.flush()
    os.chdir(SHELL_IN)  # a resumed run has gone elsewhere
    of_sweep = "agentrl.sweep.process"
    module = of_sweep if of_sweep in sys.orig_argv else "agentrl"
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
