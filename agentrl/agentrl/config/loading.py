"""Read a command's settings: flags win over the environment, that over the file, that over a
resumed run's settings. What each setting means is ``settings``'s.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from pydantic import BaseModel, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsError,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from agentrl.config.checks import table_of_estimator
from agentrl.config.commands import COMMANDS, JoinConfig, ModelCommand
from agentrl.config.errors import ConfigError, explain, unknown_setting
from agentrl.config.renamed_settings import RENAMED
from agentrl.config.setting_names import flag_of, nearest, settings_of

Config = TypeVar("Config", bound="ModelCommand | JoinConfig")

_PREFIX = "AGENTRL_"
_OF_AGENTS = ("model", "gateway", "task")
"""Variables that agents read: no settings, though old settings had these names."""
_FILES = {
    ".toml": TomlConfigSettingsSource,
    ".yaml": YamlConfigSettingsSource,
    ".yml": YamlConfigSettingsSource,
}


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line said.

    Attributes:
        settings: nested, those that were given.
        agent: the positional argument.
        config: the file of settings.
        resume: the run folder to continue.
    """

    settings: dict[str, Any]
    agent: str | None
    config: Path | None
    resume: Path | None


def load(
    command: type[Config], flags: Flags, environment: Mapping[str, str] = os.environ
) -> Config:
    """Merge the sources and validate.

    Raises:
        ConfigError: names each setting that is wrong, and the fix.
    """
    given = _merged(
        _from_file(command, flags.config) if flags.config else {},
        _from_environment(command, environment),
        flags.settings,
        {"agent": {"entrypoint": flags.agent}} if flags.agent else {},
    )
    before = _resumed(flags.resume, given) if flags.resume else {}
    try:
        return command.model_validate(_merged(before, given))
    except ValidationError as error:
        raise ConfigError(explain(error, command)) from error


def parse_flags(command: type[BaseModel], tokens: Sequence[str]) -> Flags:
    """Read the tokens after the command's name.

    Raises:
        ConfigError: there is no such flag; names its new name or the nearest one.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    if command is COMMANDS["train"]:
        parser.add_argument("--resume", type=Path)
    source = CliSettingsSource(
        _settings_class(command),
        root_parser=parser,
        cli_parse_args=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )
    try:
        given, rest = parser.parse_known_args(_in_full(tokens, command))
        values = vars(given)
        config, resume = values.pop("config"), values.pop("resume", None)
        raw = {name: values.pop(name) for name in _raw_settings(command) if values.get(name)}
        settings = source(parsed_args=given)()
    except (argparse.ArgumentError, SettingsError) as error:
        raise ConfigError(str(error)) from error
    for token in rest:
        if token.startswith("-"):
            raise ConfigError(_unknown_flag(token.partition("=")[0], command))
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r} is one argument too many: the agent is {rest[0]!r}")
    for name, value in raw.items():
        settings = _merged(settings, _nested(name, value if isinstance(value, str) else value[-1]))
    return Flags(settings, rest[0] if rest else None, config, resume)


def short_flags(command: type[BaseModel]) -> dict[str, str | list[str]]:
    return getattr(command, "short_flags", {})


def _raw_settings(command: type[BaseModel]) -> list[str]:
    """Settings whose text the models read themselves: JSON, or names with commas."""
    return [one.name for one in settings_of(command) if get_origin(one.field.annotation) is dict]


def _nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def _merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later sources win."""
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = _merged(merged[key], value) if both else value
    return merged


def _settings_class(command: type[BaseModel]) -> type[BaseSettings]:
    """The command as pydantic-settings takes it; never instantiated."""
    return cast(
        "type[BaseSettings]", create_model(command.__name__, __base__=(BaseSettings, command))
    )


def _in_full(tokens: Sequence[str], command: type[BaseModel]) -> list[str]:
    """Replace short flags, and ``--x -y`` by ``--x=-y`` where a value may begin with a hyphen."""
    long = {
        f"--{short}": flag_of(name)
        for name, flags in short_flags(command).items()
        for short in ([flags] if isinstance(flags, str) else flags)
    }
    full: list[str] = []
    for token in tokens:
        flag, equals, value = token.partition("=")
        if full and full[-1] == "--sampler.vllm.args":
            full[-1] += f"={token}"
        else:
            full.append(long.get(flag, flag) + equals + value)
    return full


def _unknown_flag(flag: str, command: type[BaseModel]) -> str:
    name = flag.lstrip("-").replace("-", "_")
    if name in RENAMED:
        known = {setting.name for setting in settings_of(command)}
        places = [flag_of(one) for one in RENAMED[name] if one in known]
        if places:
            return f"{flag}: is now {' or '.join(places)}"
    flags = [setting.flag for setting in settings_of(command) if setting.flag]
    for short in short_flags(command).values():
        flags += [f"--{one}" for one in ([short] if isinstance(short, str) else short)]
    return f"{flag}: there is no such flag.{nearest(flag, flags) or ' See --help-all.'}"


def _from_file(command: type[BaseModel], path: Path) -> dict[str, Any]:
    kind = _FILES.get(path.suffix)
    if kind is None:
        raise ConfigError(f"config: {str(path)!r} must end in .toml, .yaml or .yml")
    if not path.is_file():
        raise ConfigError(f"config: there is no file {str(path)!r}")
    try:
        return kind(_settings_class(command), path)()
    except (ValueError, OSError) as error:
        raise ConfigError(f"config: cannot read {str(path)!r}: {error}") from error


def _from_environment(command: type[BaseModel], environment: Mapping[str, str]) -> dict[str, Any]:
    known = {setting.name for setting in settings_of(command)}
    tables = {name for name in known if "." not in name}
    ours: dict[str, str] = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX):
            continue
        name = variable.removeprefix(_PREFIX).lower().replace("__", ".")
        if name in known or name.partition(".")[0] in tables:
            ours[variable] = value
        elif "." in name and not _of_another_command(name):
            raise ConfigError(f"{variable}: {unknown_setting(name, command)}")
        elif name in RENAMED and name not in _OF_AGENTS:
            places = [_PREFIX + one.upper().replace(".", "__") for one in RENAMED[name]]
            raise ConfigError(f"{variable}: is now {' or '.join(places)}")
    source = EnvSettingsSource(
        _settings_class(command), env_prefix=_PREFIX, env_nested_delimiter="__"
    )
    source.env_vars = {name.lower(): value for name, value in ours.items()}
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(f"{error}: it is not valid JSON") from error


def _of_another_command(name: str) -> bool:
    return any(name == one.name for command in COMMANDS.values() for one in settings_of(command))


def _resumed(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run to resume, without the options of what another loss replaces."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"resume: {str(folder)!r} is no run folder: it has no config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings.get("agent"), dict):
        raise ConfigError(
            f"resume: {folder} was started by an earlier version, whose settings were flat; it can "
            "be looked at (`agentrl runs show`), evaluated and served, but not continued"
        )
    algorithm = settings["algorithm"]
    for what in ("loss", "estimator"):
        if given.get("algorithm", {}).get(what, algorithm[what]) != algorithm[what]:
            algorithm.pop(table_of_estimator(algorithm[what]), None)
    return settings
