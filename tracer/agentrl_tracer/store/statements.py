"""Build statements for SQLite and PostgreSQL, and compile those of the hot path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any, cast

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler

AnySelect = sa.Select[*tuple[Any, ...]]


def json_text(value: Any) -> str:
    """Serialize for a JSON column: the same text for the same value in both databases."""
    try:
        return orjson.dumps(value).decode()  # eight times as fast as json
    except TypeError:  # integers beyond 64 bits, lone surrogates, very deep nesting
        return json.dumps(value)


def json_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # what only ``json`` could write
        return json.loads(text)


@cache  # building a statement costs several times as much as executing it
def upsert(
    is_postgres: bool, table: sa.Table, update: tuple[str, ...] = (), keep: tuple[str, ...] = (),
    add: tuple[str, ...] = (),
) -> sa.Executable:  # fmt: skip
    """Build INSERT … ON CONFLICT on the primary key.

    An existing row gets the new ``update`` columns, the new ``keep`` columns where it has nulls,
    and sums in the ``add`` columns. With none of them, it stays as it is.
    """
    insert: Any = postgresql.insert(table) if is_postgres else sqlite.insert(table)
    key = list(table.primary_key.columns)
    changes: dict[str, Any] = {name: insert.excluded[name] for name in update}
    changes |= {name: sa.func.coalesce(table.c[name], insert.excluded[name]) for name in keep}
    changes |= {name: table.c[name] + insert.excluded[name] for name in add}
    if not changes:
        return insert.on_conflict_do_nothing(index_elements=key)
    return insert.on_conflict_do_update(index_elements=key, set_=changes)


@cache
def where_among(select: AnySelect, column: sa.Column[str], size: int) -> AnySelect:
    ids = [sa.bindparam(f"id{i}", type_=sa.Text) for i in range(size)]
    return select.where(column.in_(ids))


class CompiledStatement:
    """One statement, compiled for one database.

    Through SQLAlchemy a group commit of one call costs 215 us of CPU; with compiled statements it
    costs 92, most of it SQLite's own.

    Args:
        names: the parameters, in the order in which rows give their values.
    """

    def __init__(self, statement: sa.Executable, names: Sequence[str], dialect: Any) -> None:
        element = cast(sa.ClauseElement, statement)
        columns = list(names) if isinstance(statement, sa.Insert) else None
        compiled = cast(SQLCompiler, element.compile(dialect=dialect, column_keys=columns))
        assert set(compiled.binds) == set(names), (set(compiled.binds), names)
        self.sql = compiled.string
        self._names = tuple(names)
        # SQLite takes parameters by position, psycopg by name.
        order = compiled.positiontup
        self._order = None if order is None else [names.index(name) for name in order]
        if self._order == list(range(len(names))):
            self._order = []  # already in order
        kinds: list[Any] = [compiled.binds[name].type.dialect_impl(dialect) for name in names]
        processors = [kind.bind_processor(dialect) for kind in kinds]
        self._processors = [(i, process) for i, process in enumerate(processors) if process]

    def parameters(self, row: Sequence[Any]) -> Any:
        """Convert a row to the driver's parameters."""
        values = list(row)
        for i, process in self._processors:
            values[i] = process(values[i])
        if self._order is None:
            return dict(zip(self._names, values, strict=True))
        return [values[i] for i in self._order] if self._order else values

    def first_value(self, connection: Any, row: Sequence[Any]) -> Any:
        """Execute a select on a driver's connection; return its first value, or None."""
        # Closed: an open statement would keep reading the present snapshot.
        with closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, self.parameters(row))
            found = cursor.fetchone()
        return None if found is None else found[0]
