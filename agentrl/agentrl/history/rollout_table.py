"""Filter, sort and search the rollouts of a run, over its index.

``where`` is an expression over the columns of the index: ``reward < 0 and step > 10``,
``status == "failed"``, ``rewards.clarity >= 0.5``, ``agent in ("searcher", "answerer")``.
"""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.history.index import COLUMNS, RolloutIndex
from agentrl_tracer.schemas import Rollout

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=", ast.NotEq: "!=",
    ast.In: "IN", ast.NotIn: "NOT IN", ast.Is: "IS", ast.IsNot: "IS NOT",
}  # fmt: skip
_SINGLE_EQUALS = re.compile(r"(?<![<>=!])=(?!=)")
NAMES = tuple(name for name in COLUMNS if name not in ("rewards", "final"))
_MOST_FOUND = 50_000
"""Calls, the newest ones, in which a search finds words: of a million it would take seconds."""
_DEFAULT_ORDER = 'purpose DESC, step DESC, "group", "index"'


@dataclass(frozen=True)
class Row:
    """A rollout as the index has it; ``rewards`` by name."""

    values: dict[str, Any]
    rewards: dict[str, float]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Page:
    rows: list[Row]
    total: int
    """Rollouts that match, on all pages."""


@dataclass(frozen=True)
class Query:
    where: str = ""
    search: str = ""
    """Words that the messages or the answers of a rollout have, all of them."""
    sort: str = ""
    """A column, with ``-`` in front for the largest first; empty: the newest step first."""
    limit: int = 50
    offset: int = 0


def find_rollouts(index: RolloutIndex, query: Query) -> Page:
    """Return one page of the rollouts that match.

    Raises:
        ConfigError: ``where``, ``sort`` or ``search`` is wrong; names it.
    """
    condition, values = _condition(query.where)
    if words := query.search.split():
        condition += (
            " AND id IN (SELECT call.rollout FROM call WHERE call.rowid IN (SELECT rowid FROM said "
            f"WHERE said MATCH ? ORDER BY rowid DESC LIMIT {_MOST_FOUND}))"
        )
        values.append(" ".join('"' + word.replace('"', '""') + '"' for word in words))
    order = _order(query.sort)
    with index.read() as db:
        try:
            [total] = db.execute(f"SELECT count(*) FROM rollout WHERE {condition}", values)
            found = db.execute(
                "SELECT * FROM rollout WHERE rowid IN (SELECT rowid FROM rollout "  # sorts less
                f"WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
                [*values, query.limit, query.offset],
            ).fetchall()
        except sqlite3.OperationalError as error:
            raise ConfigError(f"where: {error}") from error
    return Page([Row(dict(row), json.loads(row["rewards"])) for row in found], total[0])


def _order(sort: str) -> str:
    name, direction = sort.removeprefix("-"), "DESC" if sort.startswith("-") else "ASC"
    if not sort:
        return _DEFAULT_ORDER
    if name.startswith("rewards."):
        return f"{_reward_column(name.removeprefix('rewards.'))} {direction} NULLS LAST, id"
    if name not in NAMES:
        raise ConfigError(f"sort: {name!r} is no column; there are {', '.join(NAMES)}")
    return f'"{name}" {direction} NULLS LAST, id'


def _condition(where: str) -> tuple[str, list[Any]]:
    if not where.strip():
        return "1", []
    try:
        tree = ast.parse(_SINGLE_EQUALS.sub("==", where.strip()), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(
            f"where: {where!r} is not understood; try reward < 0 and step > 10"
        ) from error
    values: list[Any] = []
    return _sql(tree, values), values


def _sql(node: ast.expr, values: list[Any]) -> str:
    match node:
        case ast.BoolOp(op=op, values=parts):
            word = " AND " if isinstance(op, ast.And) else " OR "
            return "(" + word.join(_sql(part, values) for part in parts) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"NOT {_sql(operand, values)}"
        case ast.Compare(left=left, ops=operators, comparators=others):
            sides = [left, *others]
            parts = [
                f"{_value(a, values)} {_OPERATORS[type(how)]} {_value(b, values)}"
                for a, how, b in zip(sides, operators, others, strict=False)
            ]
            return "(" + " AND ".join(parts) + ")"
    raise ConfigError(
        f"where: {ast.unparse(node)!r} compares nothing; try reward < 0 and step > 10"
    )


def _value(node: ast.expr, values: list[Any]) -> str:
    match node:
        case ast.Name(id=name) if name in NAMES:
            return f'"{name}"'
        case ast.Attribute(value=ast.Name(id="rewards"), attr=name):
            return _reward_column(name)
        case ast.Constant(value=None):
            return "NULL"
        case ast.Constant(value=bool() | int() | float() | str() as value):
            values.append(value)
            return "?"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            values.append(-value)
            return "?"
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return "(" + ", ".join(_value(item, values) for item in items) + ")"
        case ast.Name(id=name):
            raise ConfigError(f"where: {name!r} is no column; there are {', '.join(NAMES)}, and "
                              "rewards.NAME")  # fmt: skip
    raise ConfigError(f"where: {ast.unparse(node)!r} is neither a column nor a number or text")


def _reward_column(name: str) -> str:
    quoted = json.dumps(name).replace("'", "''")
    return f"json_extract(rewards, '$.{quoted}')"


@dataclass(frozen=True)
class Beside:
    """The rollouts before and after one, in an order that ``what`` names; ids."""

    what: str
    before: str | None
    after: str | None


def beside_in_task(index: RolloutIndex, rollout: Rollout) -> Beside:
    """Return the rollouts of the same task before and after one, by step."""
    place = rollout.step, rollout.group_id, rollout.index
    at = 'purpose = ? AND task = ? AND (step, "group", "index")'
    of = rollout.purpose, task_index(rollout)
    return Beside("task", *(_first(index, f"{at} {how} (?, ?, ?)", (*of, *place), order)
                            for how, order in (("<", "DESC"), (">", "ASC"))))  # fmt: skip


def _first(index: RolloutIndex, where: str, values: Sequence[Any], order: str) -> str | None:
    by = f'step {order}, "group" {order}, "index" {order}'
    with index.read() as db:
        sql = f"SELECT id FROM rollout WHERE {where} ORDER BY {by} LIMIT 1"
        found = db.execute(sql, values).fetchone()
    return found and found["id"]


def beside_in_table(index: RolloutIndex, query: Query, rollout_id: str) -> Beside | None:
    """Return what is before and after the rollout at ``query.offset`` of a table; None if it is no
    longer there."""
    first = max(query.offset - 1, 0)
    rows = find_rollouts(index, replace(query, offset=first, limit=3)).rows
    ids = [row["id"] for row in rows]
    if rollout_id not in ids:
        return None
    return beside_in(ids, rollout_id, "table")


def beside_in(ids: Sequence[str], rollout_id: str, what: str) -> Beside:
    at = ids.index(rollout_id)
    after = ids[at + 1] if at + 1 < len(ids) else None
    return Beside(what, ids[at - 1] if at else None, after)


def of_task(index: RolloutIndex, split: str, task: int, limit: int, offset: int) -> Page:
    """Return a page of the rollouts of one task in order of their steps."""
    where, values = "purpose = ? AND task = ?", (split, task)
    with index.read() as db:
        [total] = db.execute(f"SELECT count(*) FROM rollout WHERE {where}", values).fetchone()
        found = db.execute(
            f'SELECT * FROM rollout WHERE {where} ORDER BY step, "group", "index" LIMIT ? OFFSET ?',
            (*values, limit, offset),
        ).fetchall()
    return Page([Row(dict(row), json.loads(row["rewards"])) for row in found], total)


def task_index(rollout: Rollout) -> int:
    """Return the place of a rollout's task in its split."""
    return int(rollout.task_id.rpartition("-")[2])


def members(index: RolloutIndex, group: str) -> Sequence[Row]:
    """Return the rollouts of a group, in order."""
    with index.read() as db:
        found = db.execute('SELECT * FROM rollout WHERE "group" = ? ORDER BY "index"', [group])
        return [Row(dict(row), json.loads(row["rewards"])) for row in found]
