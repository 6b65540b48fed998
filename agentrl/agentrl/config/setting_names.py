"""The settings of a command by their dotted names, as read from its models.

Knows no values: files, flags and the environment are ``loading``'s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
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
    """

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        """Its flag; empty for the rows of a table, which have none."""
        return "" if NAME in self.name else flag_of(self.name)

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
        if default is None or default is PydanticUndefined or default in ({}, []):
            return None
        if isinstance(default, bool):
            return str(default).lower()
        return f"{default:g}" if isinstance(default, float) else str(default)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a command (or of a table) in their order; tables are walked into."""
    for key, field in model.model_fields.items():
        name = prefix + key
        if (table := _table(field)) is not None:
            yield from settings_of(table, f"{name}.")
        else:
            yield Setting(name, field)
            if (row := _row(field)) is not None:
                yield from settings_of(row, f"{name}.{NAME}.")


def tables_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The tables directly under a model, by name."""
    found = {name: _table(field) for name, field in model.model_fields.items()}
    return {name: table for name, table in found.items() if table is not None}


def field_at(model: type[BaseModel], location: Iterable[int | str]) -> tuple[FieldInfo | None, str]:
    """Find the setting that a validation error is about.

    Returns:
        Its field, None where the location is a table or unknown; and its dotted name.
    """
    names: list[str] = []
    inside: type[BaseModel] | None = model
    row: type[BaseModel] | None = None
    field = None
    for part in location:
        if inside is not None:
            field = inside.model_fields.get(str(part))
            if field is None:
                return None, ".".join([*names, str(part)])
            inside, row = _table(field), _row(field)
        elif row is not None and isinstance(part, str) and part != "[key]":
            inside, row = row, None
        else:
            break
        names.append(str(part))
    return (None if inside is not None and field is not None and row is None else field), ".".join(
        names
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` with the known name nearest to ``name``; empty if none is."""
    names = list(known)
    if "." not in name:
        names = [*dict.fromkeys(one.partition(".")[0] for one in names), *names]
    last = name.rpartition(".")[2]
    same = [one for one in names if one.rpartition(".")[2] == last]  # the wrong table
    near = same or difflib.get_close_matches(name, names, n=1)
    if not near:
        ends = {one.rpartition(".")[2]: one for one in names}
        near = [ends[one] for one in difflib.get_close_matches(last, ends, n=1)]
    return f" Did you mean {near[0]}?" if near else ""


def _table(field: FieldInfo) -> type[BaseModel] | None:
    return _model(field.annotation)


def _row(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a row, of a table whose keys the user chooses."""
    arguments = get_args(field.annotation)
    return _model(arguments[1]) if len(arguments) == 2 else None


def _model(annotation: Any) -> type[BaseModel] | None:
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None
