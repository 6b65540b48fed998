"""Filter, sort and search the rollouts of a run, over its index.

``where`` is an expression over the columns of the index: ``reward < 0 and step > 10``,
``status == "failed"``, ``rewards.clarity >= 0.5``, ``rewards["human:quality"] < 0``,
``agent in ("searcher", "answerer")``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.config.errors import ConfigError
from agentrl.history.index import COLUMNS, Index, all_words
from agentrl_tracer.schemas import Json, Rollout

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=", ast.NotEq: "!=",
    ast.In: "IN", ast.NotIn: "NOT IN", ast.Is: "IS", ast.IsNot: "IS NOT",
}  # fmt: skip
_SINGLE_EQUALS = re.compile(r"""'[^']*'|"[^"]*"|(?<![<>=!])=(?!=)""")  # or a string, as it is
NAMES = tuple(name for name in COLUMNS if name not in ("rewards", "final"))
_MOST_FOUND = 50_000
"""Calls, the newest ones, in which a search finds words: of a million it would take seconds."""
_EXAMPLE = "try reward < 0 and step > 10"

Row = Json
"""A rollout: the columns of the index, ``rewards`` by name."""


class Page(NamedTuple):
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


class Beside(NamedTuple):
    """The rollouts before and after one, in an order that ``what`` names; ids."""

    what: str
    before: str | None
    after: str | None


def find_rollouts(index: Index, query: Query) -> Page:
    """Return one page of the rollouts that match.

    Raises:
        ConfigError: ``where``, ``sort`` or ``search`` is wrong; names it.
    """
    with index.asked("where") as db:
        condition, order, values = _parts(query)
        [total] = db.execute(f"SELECT count(*) FROM rollout WHERE {condition}", values)
        found = db.execute(
            "SELECT * FROM rollout WHERE rowid IN (SELECT rowid FROM rollout "  # sorts less
            f"WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
            [*values, query.limit, query.offset],
        ).fetchall()
    return Page([{**row, "rewards": json.loads(row["rewards"])} for row in found], total[0])


def of_task(index: Index, purpose: str, task: int, limit: int, offset: int) -> Page:
    """Return a page of the rollouts of one task in order of their steps."""
    where = f"purpose == {purpose!r} and task == {task}"
    return find_rollouts(index, Query(where, sort="step", limit=limit, offset=offset))


def members(index: Index, group: str) -> Sequence[Row]:
    """Return the rollouts of a group, in order."""
    return find_rollouts(index, Query(f"group == {group!r}", sort="index", limit=-1)).rows


def beside_in_task(index: Index, rollout: Rollout) -> Beside | None:
    """Return what is before and after a rollout among those of its task; None: not indexed."""
    before, after = (
        f"SELECT id FROM rollout WHERE purpose = this.purpose AND task = this.task AND (step, id) "
        f"{how} (this.step, this.id) ORDER BY step {order}, id {order} LIMIT 1"
        for how, order in (("<", "DESC"), (">", "ASC"))
    )
    with index.read() as db:
        query = f"SELECT ({before}), ({after}) FROM rollout AS this WHERE id = ?"
        found = db.execute(query, [rollout.id]).fetchone()
    return found and Beside("task", *found)


def beside_in_table(index: Index, query: Query, rollout_id: str) -> Beside | None:
    """Return what is before and after the rollout at ``query.offset`` of a table; None if it is no
    longer there."""
    with index.asked("where") as db:
        condition, order, values = _parts(query)
        three = f"SELECT id FROM rollout WHERE {condition} ORDER BY {order} LIMIT 3 OFFSET ?"
        rows = db.execute(three, [*values, max(query.offset - 1, 0)]).fetchall()
    return beside_in([row["id"] for row in rows], rollout_id, "table")


def beside_in(ids: Sequence[str], rollout_id: str, what: str) -> Beside | None:
    if rollout_id not in ids:
        return None
    around = [None, *ids, None]
    at = ids.index(rollout_id)
    return Beside(what, around[at], around[at + 2])


# ---- expressions as SQL


def _parts(query: Query) -> tuple[str, str, list[Any]]:
    """Return condition, order, and the values of the condition."""
    values: list[Any] = []
    condition = _condition(query.where, values)
    if query.search.split():
        condition += (
            " AND id IN (SELECT call.rollout FROM call WHERE call.rowid IN (SELECT rowid FROM said "
            f"WHERE said MATCH ? ORDER BY rowid DESC LIMIT {_MOST_FOUND}))"
        )
        values.append(all_words(query.search))
    return condition, _order(query.sort), values


def _order(sort: str) -> str:
    name, direction = sort.removeprefix("-"), "DESC" if sort.startswith("-") else "ASC"
    if not sort:
        return "purpose DESC, step DESC, id"
    if name.startswith("rewards."):
        return f"{_reward(name.removeprefix('rewards.'))} {direction} NULLS LAST, id"
    if name not in NAMES:
        raise ConfigError(f"sort: {name!r} is no column; there are {', '.join(NAMES)}")
    return f'"{name}" {direction} NULLS LAST, id'


def _condition(where: str, values: list[Any]) -> str:
    """Return a condition in SQL; the constants in it are added to ``values``."""
    if not where.strip():
        return "1"
    for text in (where.strip(), _SINGLE_EQUALS.sub(_doubled, where.strip())):
        with contextlib.suppress(SyntaxError):
            return _sql(ast.parse(text, mode="eval").body, values)
    raise ConfigError(f"where: {where!r} is not understood; {_EXAMPLE}")


def _doubled(found: re.Match[str]) -> str:
    return "==" if found[0] == "=" else found[0]


def _sql(node: ast.expr, values: list[Any]) -> str:
    match node:
        case ast.BoolOp(op=op, values=parts):
            word = " AND " if isinstance(op, ast.And) else " OR "
            return "(" + word.join(_sql(part, values) for part in parts) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"NOT {_sql(operand, values)}"
        case ast.Compare(left=left, ops=operators, comparators=others):
            parts = [
                f"{_value(a, values)} {_operator(how, a, b)} {_value(_listed(how, b), values)}"
                for a, how, b in zip([left, *others], operators, others, strict=False)
            ]
            return "(" + " AND ".join(parts) + ")"
    raise ConfigError(f"where: {ast.unparse(node)!r} compares nothing; {_EXAMPLE}")


def _operator(how: ast.cmpop, left: ast.expr, right: ast.expr) -> str:
    """Return SQL's, which asks for no value by IS alone."""
    if any(isinstance(one, ast.Constant) and one.value is None for one in (left, right)):
        how = {ast.Eq: ast.Is(), ast.NotEq: ast.IsNot()}.get(type(how), how)
    return _OPERATORS[type(how)]


def _listed(how: ast.cmpop, right: ast.expr) -> ast.expr:
    """Return what follows the operator; Python drops the parentheses around a single item."""
    if not isinstance(how, ast.In | ast.NotIn) or isinstance(right, ast.Tuple | ast.List):
        return right
    if isinstance(right, ast.Constant | ast.UnaryOp):
        return ast.Tuple(elts=[right])
    raise ConfigError(f"where: {ast.unparse(right)!r} is no list; write it as in ('a', 'b')")


def _value(node: ast.expr, values: list[Any]) -> str:
    match node:
        case ast.Name(id=name) if name in NAMES:
            return f'"{name}"'
        case ast.Name(id=name):
            known = ", ".join(NAMES)
            raise ConfigError(f"where: {name!r} is no column; there are {known}, and rewards.NAME")
        case (
            ast.Attribute(value=ast.Name(id="rewards"), attr=str(name))
            | ast.Subscript(value=ast.Name(id="rewards"), slice=ast.Constant(value=str(name)))
        ):
            return _reward(name)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return "(" + ", ".join(_value(item, values) for item in items) + ")"
        case ast.Constant(value=None | bool() | int() | float() | str()) | ast.UnaryOp(ast.USub()):
            with contextlib.suppress(ValueError):  # minus before a word
                values.append(ast.literal_eval(node))
                return "?"
    raise ConfigError(f"where: {ast.unparse(node)!r} is neither a column nor a number or text")


def _reward(name: str) -> str:
    quoted = json.dumps(name).replace("'", "''")
    return f"json_extract(rewards, '$.{quoted}')"
