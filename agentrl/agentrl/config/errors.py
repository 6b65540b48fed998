"""The error for settings that cannot be used, and its words for a failed validation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.setting_names import nearest, setting_at, settings_of

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """The settings cannot be used; the message names each field, its value and the fix."""


def explain(error: ValidationError, command: type[BaseModel]) -> str:
    """Describe a validation error, a line for each wrong setting: name, value, what is allowed."""
    # A misspelled name first: it may be the setting that the others say is missing.
    problems = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    return "\n".join(dict.fromkeys(_explain_one(one, command) for one in problems))


def no_run_folder(path: Path) -> str:
    """Say that there is no run at ``path``, and where the one of this name is."""
    near = Path("runs") / path
    meant = f"; did you mean {str(near)!r}?" if (near / "config.json").is_file() else ""
    why = "it has no config.json" if path.exists() else "it does not exist"
    return f"{str(path)!r} is no run folder: {why}{meant}"


def unknown_setting(name: str, command: type[BaseModel]) -> str:
    """Say that no setting has this name, and name the nearest one."""
    near = nearest(name, [setting.name for setting in settings_of(command)])
    return f"{name}: there is no such setting.{near or ' --help-all shows all there are.'}"


def _explain_one(problem: ErrorDetails, command: type[BaseModel]) -> str:
    said = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return unknown_setting(".".join(map(str, problem["loc"])), command)
    setting, name = setting_at(command, problem["loc"])
    if problem["type"] == "model_type" and setting is None:
        inside = next(one.name for one in settings_of(command) if one.name.startswith(f"{name}."))
        return f"{name}: is a table of settings, such as {inside}"
    if setting is None and problem["type"] == "value_error":
        return f"{name}.{said}" if name else said  # the check of a table names its settings
    if setting is None:
        return f"{name}: {said}"
    if problem["type"] == "missing":
        return f"{name}: is missing. {setting.meaning}"
    # A user may have written a key into these.
    holds_key = name.endswith((".api_key_env", ".params", ".operator_key"))
    holds_key = holds_key or "://" in str(problem["input"])
    got = "" if holds_key else f"got {problem['input']!r}, but "
    return f"{name}: {got}{said[0].lower()}{said[1:]}. {setting.meaning}"
