"""The space of a sweep: which settings it searches, over which values; the settings of a trial."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import ValidationError

from agentrl.config.commands import SweepConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain, unknown_setting
from agentrl.config.setting_names import setting_at
from agentrl_tracer.schemas import Json

_OWN = {
    "run.name": "names its runs itself",
    "run.folder": "keeps its runs in one folder",
    "run.store": "can be looked at only if its runs are in one place",
    "run.seed": "repeats each trial with further seeds if you set sweep.seeds",
}
_HOW = "write a list of values, or { low = 1e-4, high = 1e-2, log = true }"


@dataclass(frozen=True)
class Dimension:
    """One setting that is searched: over ``choices``, or where there are none from low to high."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False
    """The setting takes whole numbers only."""

    def values(self) -> list[Any]:
        """Return all values in order; empty where there is no end of them."""
        if self.choices or (self.step is None and not self.whole) or self.log:
            return list(self.choices)
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [(int if self.whole else float)(self.low + at * step) for at in range(count)]

    def recorded(self) -> Json:
        return asdict(self) | {"choices": list(self.choices)}


def read_space(config: SweepConfig) -> list[Dimension]:
    """Return the dimensions of a sweep, in their order.

    Raises:
        ConfigError: names a setting that does not exist, or a value that it does not take.
    """
    space = [_dimension(name, given) for name, given in _flat(config.sweep.space)]
    settings = shared_settings(config)
    for one in space:
        for value in one.choices or (one.low, one.high):
            value = int(value) if one.whole else value
            try:
                TrainConfig.model_validate(with_values(settings, {one.name: value}))
            except ValidationError as error:
                raise ConfigError(f"sweep.space: {explain(error, TrainConfig)}") from error
        if config.sweep.sampler == "grid" and not one.values():
            raise ConfigError(
                f"sweep.space.{one.name}: a grid needs a list of values, or a step that is added"
            )
    return space


def shared_settings(config: SweepConfig) -> Json:
    """Return what the user has set, by table, besides the sweep itself."""
    given = config.model_dump(mode="json", exclude_unset=True, exclude={"sweep": True})
    given.get("run", {}).pop("name", None)
    return {table: rows for table, rows in given.items() if rows != {}}


def with_values(settings: Mapping[str, Any], values: Mapping[str, Any]) -> Json:
    """Return settings with some replaced, by dotted name."""
    changed = copy.deepcopy(dict(settings))
    for name, value in values.items():
        *tables, key = name.split(".")
        place = changed
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return changed


def _flat(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk into tables: TOML reads a name without quotes, ``learning.rank``, as one."""
    for name, given in space.items():
        if isinstance(given, Mapping) and not {"low", "high"} & given.keys():
            yield from _flat(given, f"{prefix}{name}.")
        else:
            yield prefix + name, given


def _dimension(name: str, given: Any) -> Dimension:
    setting, found = setting_at(TrainConfig, name.split("."))
    if setting is None or found != name:
        raise ConfigError(f"sweep.space.{unknown_setting(name, TrainConfig)}")
    if name in _OWN:
        raise ConfigError(f"sweep.space.{name}: cannot be searched; the sweep {_OWN[name]}")
    where = f"sweep.space.{name}"
    if isinstance(given, list):
        if not given or not all(isinstance(one, str | int | float | bool) for one in given):
            raise ConfigError(f"{where}: got {given!r}; {_HOW}")
        return Dimension(name, choices=tuple(dict.fromkeys(given)))
    if not isinstance(given, Mapping) or given.keys() - {"low", "high", "log", "step"}:
        raise ConfigError(f"{where}: got {given!r}; {_HOW}")
    whole = _is_whole(setting.field.annotation)
    found = Dimension(name, whole=whole, **{"low": math.nan, "high": math.nan, **given})
    numbers = [found.low, found.high, 1 if found.step is None else found.step]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        raise ConfigError(f"{where}: low, high and step must be numbers; {_HOW}")
    if whole and any(one != int(one) for one in numbers):
        raise ConfigError(f"{where}: the setting takes whole numbers; so must low, high and step")
    if not found.low < found.high or numbers[2] <= 0:
        raise ConfigError(f"{where}: low must be below high, and step above 0; {_HOW}")
    if found.log and (found.low <= 0 or found.step is not None):
        raise ConfigError(f"{where}: with log = true, low must be above 0, and there is no step")
    return found


def _is_whole(kind: Any) -> bool:
    inside = get_args(kind)
    return kind is int or (any(map(_is_whole, inside)) and float not in inside)
