"""The space of a sweep: the settings that it searches, as Optuna's distributions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from agentrl.config.commands import SweepConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain, unknown_setting
from agentrl.config.setting_names import setting_at
from agentrl_tracer.schemas import Json

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]
"""What to choose from, by the setting's name."""

_OWN = ("run.name", "run.folder", "run.store", "run.seed")
_HOW = "write a list of values, or { low = 1e-4, high = 1e-2, log = true }"


def read_space(config: SweepConfig) -> Space:
    """Return the space of a sweep, in its order.

    Raises:
        ConfigError: names a setting that cannot be searched, or a value that it does not take.
    """
    space: Space = {}
    for name, given in config.sweep.space.items():
        space[name] = _distribution(name, given)
        if config.sweep.sampler == "grid" and not isinstance(given, list):
            raise ConfigError(f"sweep.space.{name}: a grid needs a list of values")
        for value in given if isinstance(given, list) else (given["low"], given["high"]):
            try:
                TrainConfig.model_validate(trial_settings(config, {name: value}))
            except ValidationError as error:
                raise ConfigError(f"sweep.space: {explain(error, TrainConfig)}") from error
    return space


def trial_settings(config: SweepConfig, values: Mapping[str, Any]) -> Json:
    """Return what the user has set, by table, with ``values`` by dotted name in its place."""
    given = config.model_dump(mode="json", exclude_unset=True, exclude={"sweep": True})
    settings = {table: rows for table, rows in _without_nulls(given).items() if rows != {}}
    settings.get("run", {}).pop("name", None)
    for name, value in values.items():
        *tables, key = name.split(".")
        place = settings
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return settings


def _without_nulls(given: Any) -> Any:
    """Leave out what has no value: the trials' settings are TOML, which has no word for it."""
    if not isinstance(given, dict):
        return given
    return {key: _without_nulls(value) for key, value in given.items() if value is not None}


def _distribution(name: str, given: Any) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    setting, found = setting_at(TrainConfig, name.split("."))
    if setting is None or found != name:
        hint = "" if "." in name else ' Write whole names in quotes: "learning.rank" = [8, 16]'
        raise ConfigError(f"sweep.space.{unknown_setting(name, TrainConfig)}{hint}")
    if name in _OWN:
        raise ConfigError(
            f"sweep.space.{name}: cannot be searched: the sweep sets it. To repeat trials with "
            "other seeds, set sweep.seeds"
        )
    if setting.variable in os.environ:
        raise ConfigError(f"sweep.space.{name}: {setting.variable} would replace it; unset that")
    try:
        if isinstance(given, list):
            return CategoricalDistribution(tuple(dict.fromkeys(given)))
        kind = IntDistribution if _is_whole(setting.field.annotation) else FloatDistribution
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sweep.space.{name}: got {given!r}; {_HOW}. {error}") from error


def _is_whole(kind: Any) -> bool:
    inside = get_args(kind)
    return kind is int or (any(map(_is_whole, inside)) and float not in inside)
