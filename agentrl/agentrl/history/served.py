"""List and search a store's calls without a run: those that ``agentrl serve`` recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.errors import ConfigError
from agentrl.history.index_file import IndexFile
from agentrl.history.rollout.conversation import answer_text, new_text
from agentrl_tracer.schemas import Call, CallState
from agentrl_tracer.store import Store

_STEP = 200
_MOST_SAID = 100_000
"""Characters of a request and of an answer that can be searched."""
_COMMIT_S = 5.0  # within which a call is in the store after its start
_LONGEST_CALL_S = 900.0  # an open call that is older will hardly be answered


class ServedIndex(IndexFile):
    """The words of a store's calls without a run, in order of their start."""

    version = 1
    layout = """
CREATE TABLE call (started_at REAL, id TEXT);
CREATE VIRTUAL TABLE said USING fts5(text, content='');
"""

    def fill(self, store: Store, run_id: None) -> bool:
        """Take in the next calls that are over; False if there was none."""
        with self.read() as db:
            newest = db.execute("SELECT * FROM call ORDER BY rowid DESC LIMIT 1").fetchone()
        now, taken = time.time(), list[Call]()
        for call in store.calls_without_run(_STEP, after=tuple(newest) if newest else (0.0, "")):
            age = now - call.started_at
            if age < (_LONGEST_CALL_S if call.state is CallState.OPEN else _COMMIT_S):
                break  # those after it would hide it
            has_bodies = call.request is not None and call.response is not None
            taken.append(call if has_bodies else store.call(call.id) or call)
        with self.write() as db:
            for call in taken:
                at = db.execute("INSERT INTO call VALUES (?, ?)", (call.started_at, call.id))
                asked, answer = new_text(call.request), answer_text(call.response)
                text = f"{asked[:_MOST_SAID]}\n{answer[:_MOST_SAID]}"
                db.execute("INSERT INTO said(rowid, text) VALUES (?, ?)", (at.lastrowid, text))
        return bool(taken)

    def signature(self) -> tuple[object, ...]:
        with self.read() as db:
            return tuple(db.execute("SELECT max(rowid) FROM call").fetchone())

    def progress(self, store: Store) -> tuple[int, int]:
        """Return how many calls the index holds, and how many there are."""
        with self.read() as db:
            [held] = db.execute("SELECT coalesce(max(rowid), 0) FROM call").fetchone()
        return held, store.count_calls_without_run()


@dataclass(frozen=True)
class ServedPage:
    calls: Sequence[Call]
    """Newest first; bodies of more than 100,000 characters are left out (None)."""
    older: str
    """``before`` of the next page; empty on the last one."""


def find_served(
    store: Store, index: ServedIndex, search: str = "", before: str = "", limit: int = 50
) -> ServedPage:
    """Return one page of a store's calls without a run.

    Args:
        search: words that all are in a call's new messages or in its answer.
        before: ``older`` of the page before.

    Raises:
        ConfigError: ``before`` is of no page.
    """
    start, _, call_id = before.partition(" ")
    try:
        place = (float(start), call_id) if before else None
    except ValueError as error:
        raise ConfigError(f"before: {before!r} is of no page") from error
    if words := search.split():
        calls = _search(store, index, words, place, limit)
    else:
        calls = store.calls_without_run(limit, before=place)
    last = calls[-1] if len(calls) == limit else None
    return ServedPage(calls, f"{last.started_at!r} {last.id}" if last else "")


def _search(
    store: Store, index: ServedIndex, words: Sequence[str], before: tuple[float, str] | None,
    limit: int,
) -> list[Call]:  # fmt: skip
    quoted = " ".join('"' + word.replace('"', '""') + '"' for word in words)
    with index.read() as db:
        found = db.execute(
            "SELECT call.id FROM said JOIN call ON call.rowid = said.rowid WHERE said MATCH ? "
            "AND (started_at, id) < (?, ?) ORDER BY said.rowid DESC LIMIT ?",
            (quoted, *(before or (1e18, "")), limit),
        ).fetchall()
    return store.calls_by_id([row["id"] for row in found])
