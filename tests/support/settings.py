"""Settings in tests: by their dotted names, or by a short name where it is clear."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentrl.config.commands import COMMANDS
from agentrl.config.setting_names import flag_of, flattened, settings_of


@cache
def dotted(name: str) -> str:
    """The setting that a short name means.

    A short flag, or the end of a dotted name: ``group_size``, ``kl_coef``, ``eval_every``.
    """
    special = {"agent": "agent.entrypoint", "correction": "algorithm.correction.mode"}
    ending = "_" + name.replace("eval_", "evaluation_")
    known = [one for command in COMMANDS.values() for one in settings_of(command) if one.flags]
    short = [one.name for one in known if name.replace("_", "-") in one.short]
    ends = [one.name for one in known if f"_{one.name.replace('.', '_')}".endswith(ending)]
    return special.get(name) or next(iter([*short, *ends]), name)


def nested(**settings: Any) -> dict[str, Any]:
    """Settings as a command's model takes them."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *path, key = (name if "." in name else dotted(name)).split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[key] = value
    return tables


def changed(recorded: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A run's recorded settings with others in place of some."""
    kept = {name: value for name, value in flattened(recorded).items() if value is not None}
    if "estimator" in settings:  # its options go with it, as when a run is resumed
        kept = {name: value for name, value in kept.items() if ".grpo." not in name}
    return nested(**kept | {dotted(name): value for name, value in settings.items()})


def flags(_command: str = "train", **settings: Any) -> list[str]:
    """Settings as a command's flags: the short one where there is one."""
    short = {one for flags in COMMANDS[_command].short_flags.values() for one in flags}
    given: list[str] = []
    for name, value in settings.items():
        flag = flag_of(name)
        given += [flag if flag[2:] in short or "." in name else flag_of(dotted(name)), str(value)]
    return given
