"""Read a command's settings: flags win over the environment, that over the file, that over a
profile's and a resumed run's settings. What each setting means is ``settings``'s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from agentrl.config.commands import (
    COMMANDS,
    JoinConfig,
    ModelCommand,
    OfflineConfig,
    TrainConfig,
    is_resumable,
)
from agentrl.config.errors import ConfigError, explain, no_run_folder, unknown_setting
from agentrl.config.field_types import Table, from_names, split_step
from agentrl.config.profiles import read_profile, within
from agentrl.config.secrets import store_url
from agentrl.config.setting_names import flattened, nearest, settings_of
from agentrl.config.settings.algorithm import table_of
from agentrl_tracer.schemas import Json

Config = TypeVar("Config", bound="ModelCommand | OfflineConfig | JoinConfig")

_PREFIX = "AGENTRL_"
_YAML_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_OF_AGENTS = ("model", "gateway", "task")
"""Variables that agents read: no settings, though a setting's name may end so."""
_MAY_BE_PATHS = (
    "agent.entrypoint", "agent.python", "agent.tasks", "evaluation.tasks", "model.name",
    "data.source", "data.held_out", "data.from_run", "data.from_served",
    "run.store", "sampler.vllm.python", "tinker.tokenizer", "algorithm.kl.reference",
    "algorithm.loss", "algorithm.estimator", "curriculum.weights",
)  # fmt: skip
_ANY_VALUE = ("--sampler.vllm.args", "--inspect.args", "--args")
"""Flags whose value may begin with a hyphen."""


def load(
    command: type[Config], tokens: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Config:
    """Read the tokens after the command's name, merge them with the other sources, and validate.

    Raises:
        ConfigError: names each setting that is wrong, and the fix.
        MissingSecretError: the resumed run's store needs a variable that is not set.
    """
    given, rest = _parse_flags(command, tokens)
    file, resume = given.pop("config"), given.pop("resume", None)
    profile = next(filter(None, map(read_profile, rest)), None)
    if profile is not None:
        rest, profile = [], within(command, profile)
    settings = _merged(
        profile or {},
        _read_file(file) if file else {},
        _from_environment(command, environment),
        *(_nested(name, value) for name, value in given.items()),
        *(_nested(command.argument[1], given) for given in rest),
    )
    if "sweep" not in command.model_fields:
        settings.pop("sweep", None)  # a sweep's file is a training's, too
    if resume:  # the run's own paths begin where it was started
        settings = _merged(_resumed(command, split_step(resume)[0], settings), _from_here(settings))
    try:
        return command.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, command)) from error


def resume_of(tokens: Sequence[str], command: str = "train") -> Path | None:
    """Return what a command is told to continue: a run folder or ``RUN@STEP``."""
    return _parse_flags(COMMANDS[command], tokens)[0]["resume"]


def _parse_flags(command: type[Table], tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags by the setting's name, and the agent where one is given."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    if is_resumable(command):
        parser.add_argument("--resume", type=Path)
    for setting in filter(lambda one: one.flags, settings_of(command)):
        kind = setting.field.annotation
        how = argparse.BooleanOptionalAction if kind is bool else "store"
        how = "append" if get_origin(kind) is list else how
        parser.add_argument(
            *setting.flags, dest=setting.name, action=how, default=argparse.SUPPRESS
        )
    tokens = list(tokens)
    for flag in filter(tokens[:-1].__contains__, _ANY_VALUE):
        at = tokens.index(flag)
        tokens[at : at + 2] = [f"{flag}={tokens[at + 1]}"]
    try:
        given, rest = parser.parse_known_args(tokens)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    for token in rest:
        if token.startswith("-") and not token.startswith("-- "):  # an agent's command line
            flag = token.partition("=")[0]
            raise ConfigError(f"{flag}: {_unknown_flag(flag, command)}")
    if {"true", "false"} & set(rest):
        raise ConfigError("true, false: a flag of yes or no takes no value: --NAME or --no-NAME")
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r} is one argument too many: the agent is {rest[0]!r}")
    return vars(given), rest


def _unknown_flag(flag: str, command: type[BaseModel]) -> str:
    flags = [one for setting in settings_of(command) for one in setting.flags]
    return f"there is no such flag.{nearest(flag, flags) or ' See --help-all.'}"


def _nested(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1:  # a list's flag, given once
        value = value[0]
    nested: Any = value
    for key in reversed(name.split(".")):
        nested = {key: nested}
    return nested


def _merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later sources win."""
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = _merged(merged[key], value) if both else value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 1e-4 as a number, as YAML 1.2 does; to PyYAML, which reads YAML 1.1, it is text."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+.0123456789"))
    read_yaml = partial(yaml.load, Loader=Loader)
    read = {".toml": tomllib.loads, ".yaml": read_yaml, ".yml": read_yaml}
    if path.suffix not in read:
        raise ConfigError(f"config: {str(path)!r} must end in .toml, .yaml or .yml")
    if not path.is_file():
        raise ConfigError(f"config: there is no file {str(path)!r}")
    try:
        found = read[path.suffix](path.read_text(encoding="utf-8")) or {}
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config: cannot read {str(path)!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config: {str(path)!r} must hold tables of settings")
    return found


def _from_environment(command: type[BaseModel], environment: Mapping[str, str]) -> dict[str, Any]:
    known = {setting.name for setting in settings_of(command)}
    of_any = {one.name for kind in COMMANDS.values() for one in settings_of(kind)}
    without_table = {name.rpartition(".")[2] for name in known}.difference(_OF_AGENTS)
    given: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX):
            continue
        name = variable.removeprefix(_PREFIX).lower().replace("__", ".")
        if name in known or name.partition(".")[0] in known:  # a row of a table
            given = _merged(given, _nested(name, value))
        elif name in without_table or ("." in name and name not in of_any):
            raise ConfigError(f"{variable}: {unknown_setting(name, command)}")
    return given


def _from_here(settings: dict[str, Any]) -> dict[str, Any]:
    """Make the paths among settings absolute, of what is in the working directory."""
    for name, value in flattened(settings).items():
        if name == "rewards":
            settings = settings | {name: [_from_here_one(one) for one in from_names(value)]}
        elif name in _MAY_BE_PATHS:
            settings = _merged(settings, _nested(name, _from_here_one(value)))
    return settings


def _from_here_one(value: Any) -> Any:
    path, colon, function = str(value).partition(":")
    return f"{Path(path).absolute()}{colon}{function}" if os.path.exists(path) else value


def _resumed(command: type[Table], folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run to resume, without the options of a loss, an estimator or a backend
    that another one replaces."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"resume: {no_run_folder(folder)}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"resume: {path} is damaged; bring a copy back: {error}") from error
    if "imported" in settings:
        raise ConfigError(f"resume: {str(folder)!r} holds imported trajectories, and no training")
    if issubclass(command, OfflineConfig) or "data" in settings:
        if settings.keys() != command.model_fields.keys():
            raise ConfigError(
                f"resume: {str(folder)!r} is the run of another command; `agentrl runs show` says "
                "which one continues it"
            )
        return settings
    if not isinstance(settings.get("agent"), dict):
        raise ConfigError(
            f"resume: {folder} was started by an earlier version, whose settings were flat; it can "
            "be looked at (`agentrl runs show`), evaluated and served, but not continued"
        )
    if (store := settings["run"].get("store")) and "store" not in given.get("run", {}):
        store_url(store)  # the settings are right, but their password is not here
    algorithm = settings["algorithm"]
    for what in ("loss", "estimator"):
        if given.get("algorithm", {}).get(what, algorithm[what]) != algorithm[what]:
            algorithm.pop(table_of(algorithm[what]), None)
    backend = settings["run"].get("backend")
    if given.get("run", {}).get("backend", backend) != backend:
        settings.pop("verl", None)
        for name in ("trainers_on", "shard_base"):
            settings["learning"].pop(name, None)
    return settings


def steps_of(config: TrainConfig, tasks: Sequence[Json]) -> int:
    """Return the steps of the run: by default those of one epoch."""
    return config.run.steps or math.ceil(len(tasks) / config.rollouts.batch_size)
