"""Index a run's rollouts in a file of its own beside the run: a summary of each, and its texts.

A store is laid out for recording. Sorting 100,000 rollouts by reward, or searching the messages of
a million calls, needs sums and words that it does not keep. ``RolloutIndex`` holds them in
``view.db``; ``fill`` brings it up to date in small steps. It can be deleted at any time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from agentrl.history.index_file import IndexFile
from agentrl.history.rollout.conversation import answer_text, new_text
from agentrl.history.rollout.trace import count_tokens, earned_by_name
from agentrl_tracer.schemas import Attempt, Call, Reward, Rollout, RolloutState
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import by_rollout, rollout_reward

VERSION = 3
"""Of the layout; a file of another version is made anew."""
_STEP = 200
"""Rollouts that one call of ``fill`` looks at."""
_MOST_SAID = 100_000
"""Characters of a request and of an answer that can be searched."""
_ENDED = (RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED)

COLUMNS: dict[str, str] = {
    "id": "TEXT PRIMARY KEY",
    "step": "INTEGER",
    "purpose": "TEXT",
    "task": "INTEGER",
    "group": "TEXT",
    "index": "INTEGER",
    "status": "TEXT",
    "reward": "REAL",
    "rewards": "TEXT",
    "attempts": "INTEGER",
    "calls": "INTEGER",
    "prompt_tokens": "INTEGER",
    "tokens": "INTEGER",
    "seconds": "REAL",
    "agent": "TEXT",
    "error": "TEXT",
    "started_at": "REAL",
    "final": "INTEGER",
}
"""Columns of the table of rollouts and their types. ``task`` is the task's place in its split,
``tokens`` counts sampled tokens, ``rewards`` is JSON by name, ``final`` is 1 once the rollout has
ended."""
_LAYOUT = f"""
CREATE TABLE rollout ({", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())});
CREATE INDEX by_place ON rollout (purpose DESC, step DESC, "group", "index");
CREATE INDEX by_task ON rollout (purpose, task, step, "group", "index");
CREATE INDEX by_group ON rollout ("group", "index");
CREATE INDEX by_status ON rollout (status, id);
CREATE INDEX unfinished ON rollout (final) WHERE final = 0;
CREATE TABLE call (id TEXT, rollout TEXT);
CREATE VIRTUAL TABLE said USING fts5(text, content='');
"""


class RolloutIndex(IndexFile):
    """The index of one run. Any thread may read; ``fill`` is one thread's."""

    layout, version = _LAYOUT, VERSION

    def fill(self, store: Store, run_id: str) -> bool:
        """Take in what is new, a few hundred rollouts at most; False if there was nothing."""
        db = self.prepare()
        [last] = db.execute("SELECT coalesce(max(id), '') FROM rollout").fetchone()
        new = store.rollout_ids_after(run_id, last, _STEP)
        running = [row[0] for row in db.execute("SELECT id FROM rollout WHERE final = 0 LIMIT 999")]
        self._take_in(store, run_id, [*new, *running])
        return bool(new)

    def progress(self, store: Store, run_id: str) -> tuple[int, int]:
        """Return how many rollouts the index holds, and how many there are."""
        with self.read() as db:
            [held] = db.execute("SELECT count(*) FROM rollout").fetchone()
        return held, store.count_rollouts(run_id)

    def signature(self) -> tuple[object, ...]:
        """Return what differs once the index has something new."""
        with self.read() as db:
            counts = "SELECT count(*), sum(final), max(started_at) FROM rollout"
            return tuple(db.execute(counts).fetchone())

    def _take_in(self, store: Store, run_id: str, ids: Collection[str]) -> None:
        if not ids:
            return
        rollouts = store.rollouts(run_id, ids=ids)
        ended = [rollout.id for rollout in rollouts if rollout.state in _ENDED]
        began = [rollout.id for rollout in rollouts if rollout.started_at is not None]
        calls = by_rollout(store.calls(rollout_ids=began))
        rewards = by_rollout(store.rewards(ended))
        errors = {attempt.rollout_id: attempt for attempt in store.attempts(began)}
        rows = [
            _summary(one, calls[one.id], rewards[one.id], errors.get(one.id)) for one in rollouts
        ]
        said = [
            (call.id, call.rollout_id, _searched(new_text(call.request), text))
            for rollout_id in ended
            for call in calls[rollout_id]
            if (text := answer_text(call.response)) or call.request
        ]
        marks = ", ".join("?" * len(COLUMNS))
        with self.write() as db:
            db.executemany(f"INSERT OR REPLACE INTO rollout VALUES ({marks})", rows)
            for call_id, rollout_id, text in said:
                at = db.execute("INSERT INTO call VALUES (?, ?)", (call_id, rollout_id))
                db.execute("INSERT INTO said(rowid, text) VALUES (?, ?)", (at.lastrowid, text))


def _searched(asked: str, answered: str) -> str:
    """Return what a search looks through: words beyond ``_MOST_SAID`` of each are not found."""
    text = f"{asked[:_MOST_SAID]}\n{answered[:_MOST_SAID]}"
    return text.encode(errors="replace").decode()  # SQLite takes no lone surrogates


def _summary(
    rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward], last: Attempt | None
) -> list[Any]:
    took = None
    if rollout.started_at is not None and rollout.ended_at is not None:
        took = rollout.ended_at - rollout.started_at
    return [
        rollout.id,
        rollout.step,
        rollout.purpose,
        int(rollout.task_id.rpartition("-")[2]),
        rollout.group_id,
        rollout.index,
        rollout.state,
        rollout_reward(rollout, rewards),
        json.dumps(earned_by_name(rollout, rewards)),
        rollout.attempts,
        len(calls),
        *count_tokens(calls),
        took,
        ", ".join(sorted({call.agent for call in calls if call.agent})) or None,
        rollout.reason or (last.error if last else None),
        rollout.started_at,
        int(rollout.state in _ENDED),
    ]
