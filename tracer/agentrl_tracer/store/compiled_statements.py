"""Statements of the hot path, straight to the driver: what SQLAlchemy makes of them, made once.

Knows SQLAlchemy's compiler and both drivers. Does not know tables or what is recorded. Executed by
SQLAlchemy, a group commit of one call costs 215 us of CPU; like this 92, most of it SQLite's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

Row = Sequence[Any]


class Hot:
    """One statement, compiled for one database.

    Args:
        names: the parameters, in the order in which rows give their values.
    """

    def __init__(self, statement: sa.Executable, names: Sequence[str], dialect: Any) -> None:
        element = cast(sa.ClauseElement, statement)
        columns = list(names) if isinstance(statement, sa.Insert) else None
        compiled = cast(SQLCompiler, element.compile(dialect=dialect, column_keys=columns))
        assert set(compiled.binds) == set(names), (set(compiled.binds), names)
        self.sql = compiled.string
        # By position (SQLite) or by name (psycopg).
        order = compiled.positiontup
        self._order = None if order is None else [names.index(name) for name in order]
        if self._order == list(range(len(names))):
            self._order = []  # as they come
        self._names = tuple(names)
        self._processors: list[tuple[int, Callable[[Any], Any]]] = []
        for i, name in enumerate(names):
            kind: Any = compiled.binds[name].type.dialect_impl(dialect)
            process = kind.bind_processor(dialect)
            if process is not None:
                self._processors.append((i, process))

    def parameters(self, row: Row) -> Any:
        """A row as the driver wants it."""
        values = list(row)
        for i, process in self._processors:
            values[i] = process(values[i])
        if self._order is None:
            return dict(zip(self._names, values, strict=True))
        return [values[i] for i in self._order] if self._order else values


@contextmanager
def transaction(connection: Any, begin: str | None) -> Iterator[Any]:
    """A cursor of a driver's connection; its work is committed, or undone if it raises."""
    cursor = connection.cursor()
    try:
        if begin is not None:
            cursor.execute(begin)
        yield cursor
        connection.commit()
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell
            connection.rollback()
        raise
