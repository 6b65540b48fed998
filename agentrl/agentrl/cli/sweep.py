"""``agentrl sweep``: search for the best values of settings."""

from __future__ import annotations

import re
import shlex
import time

from agentrl.cli import Tokens
from agentrl.cli.tasks import training_tasks
from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load, steps_of
from agentrl.console.output import print_line
from agentrl.gateway.handle import fetch_model
from agentrl.interrupts import end_in_order
from agentrl.runner.agent_spec import validate_agent
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import shown
from agentrl.sweep.loop import Sweep
from agentrl.sweep.space import read_space
from agentrl.sweep.study import SweepResults, check_packages, figure_of, open_study


def sweep_command(*tokens: Tokens) -> None:
    """Search for the best values of settings: each trial is a training run.

    The file has a table [sweep] beside the settings of a training; docs/sweeps.md explains it. A
    sweep that was ended, even by kill -9, goes on if it is started again with the same --name.
    """
    config = load(SweepConfig, tokens)
    check_packages(config.sweep)
    space = read_space(config)
    if config.sweep.metric.startswith("eval/") and config.evaluation.tasks is None:
        raise ConfigError(
            f"sweep.metric: {config.sweep.metric!r} needs held-out tasks; set evaluation.tasks, "
            "or take reward/mean"
        )
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    steps = steps_of(config, training_tasks(config))
    fetch_model(config)
    name = config.run.name or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(config.run.folder / name)
    if folder.config.exists():
        raise ConfigError(f"name: {shown(folder.root)} is a run; give the sweep another --name")
    folder.lock()
    study = open_study(folder, config, steps)
    trials = study.get_trials(deepcopy=False)
    own = {run for trial in trials for run in trial.user_attrs.get("runs", ())}
    alike = re.compile(rf"{re.escape(name)}-(\d{{3,}})(-\d+)?")
    for path in sorted(config.run.folder.iterdir()):
        trial = alike.fullmatch(path.name)
        if trial and int(trial[1]) < study.user_attrs["total"] and path.name not in own:
            raise ConfigError(
                f"name: {shown(path)} is no run of this sweep, and has the name of one; give the "
                "sweep another --name"
            )
    again = ["agentrl", "sweep", *tokens, *([] if config.run.name else ["--name", name])]
    end_in_order(lambda: f"go on with:  {shlex.join(again)}", within_s=None)
    print_line((f"sweep folder {folder.root}", "dim"))
    Sweep(folder, config, space, study, steps).run()
    found = SweepResults(study, folder)
    if found.best is None:
        raise RuntimeError("no trial is complete, so there is no best configuration")
    from agentrl.ui.sweep_files import write_pictures

    for path in write_pictures(folder, found):
        print_line(f"wrote {shown(path)}")
    print_line(f"best: trial {found.best.number}, {found.metric} {figure_of(found.best)}")
    print_line("train it:  ", (found.best_command, "bold cyan"))
