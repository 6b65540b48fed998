"""The help of commands that take settings: one screen of short flags, or all settings."""

from __future__ import annotations

import importlib
import inspect

from rich.table import Table

from agentrl.config.commands import COMMANDS
from agentrl.config.setting_names import Setting, settings_of
from agentrl.console.output import console

_OWN = {
    "--config": "TOML or YAML file of settings.",
    "--resume": "Run folder to continue; other flags win over its settings.",
    "--help-all": "Show all settings: each is also a key of a file and an environment variable.",
}


def print_help(name: str, *, everything: bool) -> None:
    """Print what a command does and its flags: the short ones, or all of them."""
    command = COMMANDS[name]
    module = importlib.import_module(f"agentrl.cli.{name}")
    description = str(getattr(module, f"{name}_command").__doc__)
    agent = "" if name == "serve" else "AGENT "
    console.print(f"Usage: agentrl {name} {agent}[FLAGS]\n", markup=False, highlight=False)
    for paragraph in inspect.cleandoc(description).split("\n\n"):
        console.print(" ".join(paragraph.split()) + "\n", markup=False, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="cyan", min_width=22)
    table.add_column(no_wrap=not everything, overflow="fold" if everything else "ellipsis")
    known = {setting.name: setting for setting in settings_of(command)}
    if agent:
        table.add_row("AGENT", known["agent.entrypoint"].meaning)
    if everything:
        for setting in filter(lambda one: one.flag, known.values()):
            table.add_row(setting.flag, _meaning(setting))
    else:
        for one, flags in command.short_flags.items():
            table.add_row(
                f"--{flags if isinstance(flags, str) else flags[0]}", _meaning(known[one])
            )
    for flag, meaning in _OWN.items():
        if flag != "--resume" or name == "train":
            table.add_row(flag, meaning)
    console.print(table, highlight=False)


def _meaning(setting: Setting) -> str:
    said = setting.meaning.replace("[", r"\[")
    default = setting.default
    return said if default in (None, "") else rf"\[{default}] {said}"
