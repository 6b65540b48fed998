"""Index a store in a file of its own: a summary of each rollout, and the words of its calls.

A store is laid out for recording. Sorting 100,000 rollouts by reward, or searching the messages of
a million calls, needs sums and words that it does not keep. ``fill`` takes them in by small steps.
An index can be deleted at any time; that of a PostgreSQL store is a file of this machine, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.history.rollout.conversation import answer_text, new_text
from agentrl.history.rollout.trace import count_tokens, earned_by_name
from agentrl_tracer.schemas import Attempt, Call, CallState, Feedback, Reward, Rollout, RolloutState
from agentrl_tracer.store import Store, StoreError
from agentrl_trainer.data.rewards import by_rollout, human_rewards, rollout_reward

VERSION = 7
"""Of the layout; a file of another version, or of another run, is made anew."""
_STEP = 200
"""Rollouts, or served calls, that one call of ``fill`` looks at."""
_MOST_SAID = 100_000
"""Characters of a request and of an answer that can be searched."""
_ENDED = (RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED)
_COMMIT_S = 5.0  # within which a call is in the store after its start
_LONGEST_CALL_S = 900.0  # an open call that is older will hardly be answered

COLUMNS = {
    "id": "TEXT PRIMARY KEY", "step": "INTEGER", "purpose": "TEXT", "task": "INTEGER",
    "group": "TEXT", "index": "INTEGER", "status": "TEXT", "reward": "REAL", "rewards": "TEXT",
    "feedback": "INTEGER", "attempts": "INTEGER", "calls": "INTEGER", "prompt_tokens": "INTEGER",
    "tokens": "INTEGER", "seconds": "REAL", "agent": "TEXT", "error": "TEXT",
    "started_at": "REAL", "final": "INTEGER",
}  # fmt: skip
"""Columns of the table of rollouts and their types. ``task`` is the task's place in its split,
``tokens`` counts sampled tokens, ``rewards`` is JSON by name (people's are ``human:NAME``), those
that a re-score has set aside included,
``feedback`` counts how often people judged it (None: never), ``final`` is 1 once it has ended."""
_LAYOUT = f"""
CREATE TABLE rollout ({", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())});
CREATE INDEX by_step ON rollout (purpose DESC, step DESC, id, started_at, seconds);
CREATE INDEX by_task ON rollout (purpose, task, step, id);
CREATE INDEX by_group ON rollout ("group", "index");
CREATE INDEX by_status ON rollout (status, id);
CREATE INDEX evaluated ON rollout (step, task, reward, id)
    WHERE purpose = 'eval' AND final = 1 AND status != 'cancelled';
CREATE INDEX unfinished ON rollout (final, started_at) WHERE final = 0;
CREATE INDEX judged ON rollout (id, feedback) WHERE feedback IS NOT NULL;
CREATE TABLE call (id TEXT UNIQUE, rollout TEXT, started_at REAL);
CREATE VIRTUAL TABLE said USING fts5(text, content='');
CREATE TABLE mark (scored REAL);
"""
_INSERT = (
    f"INSERT INTO rollout VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f'"{name}" = excluded."{name}"' for name in COLUMNS)
)
_CHANGED_LATE = """
SELECT id, status FROM rollout WHERE status = 'cancelled'
UNION ALL SELECT id, feedback FROM rollout WHERE feedback IS NOT NULL
"""


class Index:
    """The index of a run, or (``run_id`` None) of a store's calls without a run.

    Any thread may read; ``fill`` is one thread's. Both raise StoreError where the file cannot be
    made, read or written.
    """

    def __init__(self, path: Path, store: Store, run_id: str | None) -> None:
        self.path = path
        self._store = store
        self._run_id = run_id
        self._lock = threading.RLock()
        self._made_for = zlib.crc32(f"{VERSION} {run_id}".encode()) >> 1  # of 31 bits
        self._writer: sqlite3.Connection | None = None
        self._inode = 0  # of the file that it writes

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection of its own to read with; columns by name."""
        with self._faults_named():
            self._open()
            with contextlib.closing(sqlite3.connect(self.path)) as db:
                db.row_factory = sqlite3.Row
                db.execute("PRAGMA query_only=ON")
                yield db

    @contextlib.contextmanager
    def asked(self, field: str) -> Iterator[sqlite3.Connection]:
        """Lend a connection as ``read`` does, for a query that a user wrote in ``field``.

        Raises:
            ConfigError: it is more than Python or SQLite can parse, or no text or number of theirs.
        """
        with self.read() as db:
            try:
                yield db
            except (
                sqlite3.OperationalError, sqlite3.ProgrammingError, OverflowError, UnicodeError,
                RecursionError, MemoryError,
            ) as error:  # fmt: skip
                raise ConfigError(f"{field}: {str(error) or 'is nested too deep'}") from error

    def fill(self) -> bool:
        """Take in a few hundred new rollouts, or served calls, at most; False if none was new."""
        return self._fill_served() if self._run_id is None else self._fill_run(self._run_id)

    def progress(self) -> tuple[int, int]:
        """Return how many rollouts, or served calls, the index holds, and how many there are."""
        with self.read() as db:
            rollouts, calls = _counts(db)
        if self._run_id is None:
            return calls, self._store.count_calls_without_run()
        return rollouts, self._store.count_rollouts(self._run_id)

    def signature(self) -> tuple[object, ...]:
        """Return what differs once a rollout, or a served call, is new, began or ended."""
        unfinished = "SELECT count(*), count(started_at) FROM rollout WHERE final = 0"
        with self.read() as db:
            return (*_counts(db), *db.execute(unfinished).fetchone())

    def close(self) -> None:
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _open(self) -> sqlite3.Connection:
        """Return the connection that writes, with the layout in place."""
        with self._lock:
            if self._writer is not None and self._inode == self._inode_now():  # else it was pruned
                return self._writer
            self.close()
            db = sqlite3.connect(self.path, check_same_thread=False)
            if db.execute("PRAGMA user_version").fetchone()[0] not in (0, self._made_for):
                db.close()
                for file in (self.path, *self.path.parent.glob(f"{self.path.name}-*")):
                    file.unlink(missing_ok=True)
                db = sqlite3.connect(self.path, check_same_thread=False)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")  # it can be made again
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                db.executescript(f"{_LAYOUT} PRAGMA user_version = {self._made_for};")
            self._writer, self._inode = db, self._inode_now()
            return db

    def _inode_now(self) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_ino
        return None

    @contextlib.contextmanager
    def _faults_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.path}: {error}; this user must find room and be allowed to write there; a "
                "damaged file can be deleted, and is made again"
            ) from error

    def _fill_run(self, run_id: str) -> bool:
        with self.read() as db:
            [last] = db.execute("SELECT coalesce(max(id), '') FROM rollout").fetchone()
            running = [row["id"] for row in db.execute("SELECT id FROM rollout WHERE final = 0")]
            known = {tuple(row) for row in db.execute(_CHANGED_LATE)}
            [mark] = db.execute("SELECT max(scored) FROM mark").fetchone()
        new = self._store.rollout_ids_after(run_id, last, _STEP)
        # Rewards of functions come after the rollout's end.
        scored = {} if new or mark is None else self._store.scored_since(run_id, mark)
        feedback = by_rollout(self._store.feedback(run_id))
        # A resumed run cancels rollouts that had ended.
        late = {(one, "cancelled") for one in self._store.canceled_ids(run_id)}
        late |= {(one, len(given)) for one, given in feedback.items() if one}
        self._take_in(run_id, [*new, *running], feedback, has_new_words=True)
        again = {one for one, _ in late - known if one <= last}.union(scored).difference(running)
        self._take_in(run_id, again, feedback, has_new_words=False)
        if scored or mark is None:
            self._mark(max(scored.values(), default=time.time() - _COMMIT_S))
        return bool(new)

    def take_again(self, ids: Sequence[str]) -> None:
        """Read rollouts of a run whose rewards have changed."""
        feedback = by_rollout(self._store.feedback(self._run_id))
        for at in range(0, len(ids), _STEP):
            part = ids[at : at + _STEP]
            self._take_in(str(self._run_id), part, feedback, has_new_words=False)

    def _mark(self, scored: float) -> None:
        """Note up to when rewards that were computed after their rollouts are known."""
        with self._faults_named(), self._lock, self._open() as db:
            db.execute("DELETE FROM mark")
            db.execute("INSERT INTO mark VALUES (?)", [scored])

    def _take_in(
        self, run_id: str, ids: Collection[str], feedback: Mapping[str | None, list[Feedback]], *,
        has_new_words: bool,
    ) -> None:  # fmt: skip
        if not ids:
            return
        rollouts = self._store.rollouts(run_id, ids=ids)
        began = [one.id for one in rollouts if one.started_at is not None]
        ended = [one.id for one in rollouts if one.state in _ENDED]
        calls = by_rollout(self._store.calls(rollout_ids=began, bodies=False))
        rewards = by_rollout(self._store.rewards(ended))
        last = {attempt.rollout_id: attempt for attempt in self._store.attempts(began)}
        rows = [
            _summary(r, calls[r.id], rewards[r.id], feedback.get(r.id, []), last.get(r.id))
            for r in rollouts
        ]
        self._write(rows, self._store.calls(rollout_ids=ended) if has_new_words else [])

    def _fill_served(self) -> bool:
        """Take in calls in order of their start."""
        with self.read() as db:
            newest = db.execute(
                "SELECT started_at, id FROM call ORDER BY started_at DESC, id DESC LIMIT 1"
            )
            start, call_id = newest.fetchone() or (0.0, "")
        now, taken = time.time(), list[Call]()
        for call in self._store.calls_without_run(_STEP, after=(start, call_id)):
            age = now - call.started_at
            if age < (_LONGEST_CALL_S if call.state is CallState.OPEN else _COMMIT_S):
                break  # those after it would hide it
            has_bodies = call.request is not None and call.response is not None
            taken.append(call if has_bodies else self._store.call(call.id) or call)
        self._write([], taken)
        return bool(taken)

    def _write(self, rows: Sequence[Sequence[Any]], calls: Sequence[Call]) -> None:
        with self._faults_named(), self._lock, self._open() as db:  # one transaction
            db.executemany(_INSERT, rows)
            for call in calls:
                values = call.id, call.rollout_id, call.started_at
                at = db.execute("INSERT OR IGNORE INTO call VALUES (?, ?, ?)", values)
                if not at.rowcount:  # another process that shows the same folder has it
                    continue
                said = new_text(call.request), answer_text(call.response)
                text = "\n".join(one[:_MOST_SAID] for one in said)
                text = text.encode(errors="replace").decode()  # SQLite takes no lone surrogates
                db.execute("INSERT INTO said(rowid, text) VALUES (?, ?)", (at.lastrowid, text))


def _counts(db: sqlite3.Connection) -> tuple[int, int]:
    """Return how many rollouts and calls there are, which are never deleted."""
    last = "SELECT coalesce(max(rowid), 0) FROM"
    return tuple(db.execute(f"SELECT ({last} rollout), ({last} call)").fetchone())


def _summary(
    rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward],
    feedback: Sequence[Feedback], last: Attempt | None,
) -> list[Any]:  # fmt: skip
    """Return the values of ``COLUMNS``."""
    by_name = earned_by_name(rollout, rewards)
    names = {f"human:{one.name}" for one in feedback}
    for reward in human_rewards(feedback, [rollout], calls, names):
        by_name[reward.name] = by_name.get(reward.name, 0.0) + reward.value
    took = None
    if rollout.started_at is not None and rollout.ended_at is not None:
        took = rollout.ended_at - rollout.started_at
    return [
        rollout.id, rollout.step, rollout.purpose, task_index(rollout),
        rollout.group_id, rollout.index, rollout.state.shown, rollout_reward(rollout, rewards),
        # A refused reward may be infinite, which SQLite reads in no JSON.
        json.dumps({name: x if math.isfinite(x) else None for name, x in by_name.items()}),
        len(feedback) or None, rollout.attempts, len(calls),
        *count_tokens(calls), took,
        ", ".join(sorted({call.agent for call in calls if call.agent})) or None,
        rollout.reason or (last.error if last else None),
        rollout.started_at, int(rollout.state in _ENDED),
    ]  # fmt: skip


def task_index(rollout: Rollout) -> int:
    """Return the place of a rollout's task in its split."""
    return int(rollout.task_id.rpartition("-")[2])


def all_words(search: str) -> str:
    """Return what ``said MATCH`` takes to find texts that have all words."""
    return " ".join('"' + word.replace('"', '""') + '"' for word in search.split())


def find_served(
    store: Store, index: Index, search: str = "", before: str = "", limit: int = 50
) -> list[Call]:
    """Return calls without a run, newest first; bodies of more than 100,000 characters are None.

    Args:
        search: words that all are in a call's new messages or in its answer.
        before: the last call of the page before.

    Raises:
        ConfigError: ``before`` is no call, or ``search`` is not understood.
    """
    last = store.call(before) if before else None
    if before and not last:
        raise ConfigError(f"before: {before!r} is no call of this store")
    place = (last.started_at, last.id) if last else None
    if not search.split():
        return store.calls_without_run(limit, before=place)
    with index.asked("search") as db:
        found = db.execute(
            "SELECT call.id FROM said JOIN call ON call.rowid = said.rowid WHERE said MATCH ? "
            "AND (started_at, call.id) < (?, ?) ORDER BY said.rowid DESC LIMIT ?",
            (all_words(search), *(place or (1e18, "")), limit),
        ).fetchall()
    return store.calls_by_id([row["id"] for row in found])
