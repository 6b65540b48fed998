"""The help of commands that take settings: one screen of short flags, or all settings."""

from __future__ import annotations

import importlib
import inspect

from rich.table import Table

from agentrl.config.commands import COMMANDS
from agentrl.config.setting_names import settings_of
from agentrl.console.output import console, print_block

_OWN = {
    "--config": "TOML or YAML file of settings.",
    "--resume": "Run folder to continue, RUN@STEP or RUN@best; other flags win over its settings.",
    "--help-all": "Show all settings: each is also a key of a file and an environment variable.",
}


def print_help(name: str, *, everything: bool) -> None:
    """Print what a command does and its flags: the short ones, or all of them."""
    command = COMMANDS[name]
    function = getattr(importlib.import_module(f"agentrl.cli.{name}"), f"{name}_command")
    agent = "" if name == "serve" else "AGENT "
    description = inspect.getdoc(function) or ""
    for paragraph in (f"Usage: agentrl {name} {agent}[FLAGS]", *description.split("\n\n")):
        console.print(" ".join(paragraph.split()) + "\n", markup=False, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="cyan", min_width=22)
    table.add_column(overflow="fold")
    known = {setting.name: setting for setting in settings_of(command)}
    if agent:
        table.add_row("AGENT", known["agent.entrypoint"].meaning)
    for setting in map(known.__getitem__, known if everything else command.short_flags):
        if setting.flags:
            default = rf"\[{setting.default}] " if setting.default else ""
            said = setting.meaning if everything else setting.meaning.partition(". ")[0]
            meaning = default + said.rstrip(".").replace("[", r"\[") + "."
            table.add_row(setting.flags[not everything], meaning)
    for flag, meaning in _OWN.items():
        if flag != "--resume" or name == "train":
            table.add_row(flag, meaning)
    print_block(table)
