"""The settings of a command by their dotted names, and the words for a name that is none.

Files, flags and the environment are ``loading``'s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

NAME = "NAME"
"""Stands for a key of a table whose keys the user chooses, as in ``models.NAME.timeout``."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a command.

    Attributes:
        name: dotted, as in ``rollouts.group_size``.
        field: its type, default and description.
        short: its short flags without dashes.
    """

    name: str
    field: FieldInfo
    short: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """Its flags, the short ones last; none for a row of a table."""
        if NAME in self.name:
            return []
        short = (f"--{one}" for one in self.short)
        return [*dict.fromkeys([flag_of(self.name), *short])]  # ``--rewards`` is both

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "AGENTRL_" + self.name.replace(".", "__").upper()

    @property
    def default(self) -> str | None:
        """Its default as a file would say it; None where there is none, or it is chosen later."""
        default = self.field.get_default(call_default_factory=True)
        if default in (None, PydanticUndefined, {}, []):
            return None
        if isinstance(default, bool):
            return str(default).lower()
        return f"{default:g}" if isinstance(default, float) else str(default)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(command: type[BaseModel]) -> Iterator[Setting]:
    """Yield the settings of a command in their order; tables are walked into."""
    short: dict[str, tuple[str, ...]] = getattr(command, "short_flags", {})
    for name, field in _fields(command, ""):
        yield Setting(name, field, short.get(name, ()))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        if table := model_in(field.annotation):
            yield from _fields(table, f"{prefix}{key}.")
            continue
        yield prefix + key, field
        arguments = get_args(field.annotation)
        if len(arguments) == 2 and (row := model_in(arguments[1])):
            yield from _fields(row, f"{prefix}{key}.{NAME}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return a type that is the model of a table; None for other types."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def setting_at(
    command: type[BaseModel], location: Iterable[int | str]
) -> tuple[Setting | None, str]:
    """Find the setting that a validation error is about, and its name as the user wrote it.

    The setting is None where the location is a table or unknown.
    """
    known = {one.name: one for one in settings_of(command)}
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        name, row = ".".join(parts[:end]), ".".join([parts[0], NAME, *parts[2:end]])
        if found := known.get(name) or known.get(row):
            return found, name
    return None, ".".join(parts)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` with the known name nearest to ``name``; empty if none is."""
    names = list(known)
    if "." not in name:
        names = [*dict.fromkeys(one.partition(".")[0] for one in names), *names]
    last = name.rpartition(".")[2]
    same = [one for one in names if one.rpartition(".")[2] == last]  # the wrong table
    near = sorted(same, key=lambda one: (NAME in one, one.count("."))) or difflib.get_close_matches(
        name, names, n=1
    )
    if not near:
        ends = {one.rpartition(".")[2]: one for one in names}
        near = [ends[one] for one in difflib.get_close_matches(last, ends, n=1)]
    return f" Did you mean {near[0]}?" if near else ""


# ---- what a run has recorded, in ``config.json`` and in the store


def recorded(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a recorded setting by its dotted name; ``default`` if the run has none."""
    found: Any = config
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return default if found is None else found


_TABLES = ("models", "adapters", "speakers")  # of named rows


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; tables of named rows stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        whole = not isinstance(value, Mapping) or (not prefix and key in _TABLES)
        flat |= {prefix + key: value} if whole else flattened(value, f"{prefix}{key}.")
    return flat
