"""What ``chaos.py`` checks at a run's end, from the database and what the agents wrote down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def problems_of(run: Path, store_url: str, steps: int, journal: Path) -> Iterator[str]:
    """Check the raw tables: yield a sentence for each thing that is wrong.

    ``run`` is the run folder, and ``journal`` has a line for what each agent received.

    - Every answer that an agent received is a completed call with the same text.
    - Every call trained or has a reason, never both; the gateways' counts agree with the rows.
    - Only attempts that won train, and only those whose agent came to its end.
    - No call of a winning attempt that the agent received is called disconnected.
    - The steps are 1 to the last, each once, with as many trained calls as its metrics say.
    """
    engine = sa.create_engine(driver(store_url))
    with engine.connect() as connection:

        def ask(query: str) -> list[Any]:
            return list(connection.execute(sa.text(query)).all())

        calls = {
            row.id: row
            for row in ask(
                "SELECT id, response_id, attempt_id, rollout_id, state, trained_step, skip_reason,"
                " response FROM calls"
            )
        }
        rollouts = {row.id: row for row in ask("SELECT id, winner, step, state FROM rollouts")}
        proxied = ask("SELECT coalesce(sum(proxied), 0) FROM gateways")[0][0]
    engine.dispose()
    if proxied != len(calls):
        yield f"{proxied} calls proxied, {len(calls)} recorded"
    by_response: dict[str, list[Any]] = {}
    for call in calls.values():
        by_response.setdefault(call.response_id, []).append(call)
        if (call.trained_step is None) == (call.skip_reason is None):
            verdict = (call.trained_step, call.skip_reason)
            yield f"call {call.id} ({call.state}) has the verdict {verdict}"
    lines = read_lines(journal)
    ended = {line["attempt"] for line in lines if "end" in line}
    for call in calls.values():
        if call.trained_step is not None:
            rollout = rollouts[call.rollout_id]
            if call.attempt_id != rollout.winner or call.attempt_id not in ended:
                yield f"call {call.id} of a half attempt trained in step {call.trained_step}"
            if call.trained_step != rollout.step:
                yield f"call {call.id} of step {rollout.step} trained in {call.trained_step}"
    winners = {rollout.winner for rollout in rollouts.values()}
    for line in lines:
        if "id" in line:
            yield from _problems_of_answer(line, by_response.get(line["id"], []), winners)
    yield from _problems_of_steps(run, steps, calls.values())


def _problems_of_answer(line: dict[str, Any], rows: list[Any], winners: set[str]) -> Iterator[str]:
    if not any(row.state == "completed" for row in rows):
        yield f"the answer {line['id']} that an agent received is lost"
    for row in rows:
        stored = json.loads(row.response) if isinstance(row.response, str) else row.response
        text = stored["choices"][0]["message"]["content"] or ""
        if text != line["content"]:
            yield f"the answer {line['id']} was {line['content']!r}, the store has {text!r}"
        if row.attempt_id in winners and row.skip_reason == "client_disconnected":
            yield f"the answer {line['id']} was received and is called disconnected"


def _problems_of_steps(run: Path, last: int, calls: Any) -> Iterator[str]:
    metrics = read_lines(run / "metrics.jsonl")
    steps = {row["step"]: row for row in metrics if "reward/mean" in row}
    if list(steps) != list(range(1, last + 1)):
        yield f"the steps are {list(steps)}, not 1 to {last}"
    trained = Counter(call.trained_step for call in calls if call.trained_step is not None)
    for step, row in steps.items():
        if row["calls/trained"] != trained[step]:
            yield f"step {step} trained {row['calls/trained']} calls, the store has {trained[step]}"


def driver(url: str) -> str:
    if "://" not in url:
        return f"sqlite:///{url}"
    return url.replace("postgresql://", "postgresql+psycopg://")
