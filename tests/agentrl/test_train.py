"""The whole machine, run for real: gateway, sampler, runners, trainer, store, each a process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from peft import PeftModel
from settings import flags

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Accounting, AttemptState, Purpose, RolloutState
from agentrl_tracer.store import Store, tables
from agentrl_trainer.models.loading import load_base

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
RUN = "run"
# Whole runs, some tests several of them one after the other; each has a limit of its own below.
pytestmark = pytest.mark.timeout(600)


class Run:
    """``agentrl train`` as a subprocess, and what it left behind."""

    def __init__(self, folder: Path, agent: str, **settings: Any) -> None:
        self.root = folder
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(40)))
        held_out = folder / "held_out.jsonl"
        held_out.write_text("".join(json.dumps({"n": n}) + "\n" for n in (1000, 1001)))
        settings = {
            "tasks": tasks,
            "eval_tasks": held_out,
            "runs": folder,
            "name": RUN,
            "batch_size": 4,
            "group_size": 4,
            "steps": 2,
            "runners": 2,
            "lease": 2,
        } | settings
        self.argv = [
            sys.executable,
            "-m",
            "agentrl.cli.main",
            "train",
            f"{SUPPORT / 'train_agents.py'}:{agent}",
        ]
        self.argv += flags(**settings)
        self.folder = RunFolder(folder / RUN)
        self.output = ""

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.argv, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finish(self, process: subprocess.Popen[str] | None = None) -> Run:
        process = process or self.start()
        self.output = process.communicate(timeout=150)[0]
        assert process.returncode == 0, self.output
        return self

    def start_resumed(self) -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            "-m",
            "agentrl.cli.main",
            "train",
            "--resume",
            str(self.folder.root),
        ]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def resume(self) -> Run:
        return self.finish(self.start_resumed())

    @property
    def run_id(self) -> str:
        return self.folder.run_id.read_text()

    def store(self) -> Store:
        return Store(str(self.folder.store))

    def accounting(self) -> Accounting:
        store = self.store()
        try:
            return store.accounting(self.run_id)
        finally:
            store.close()

    def curve(self) -> list[dict[str, Any]]:
        """The metrics that a run decides, without those that the clock does."""
        clocked = ("seconds/", "tokens_per_second")
        return [
            {name: value for name, value in row.items() if not name.startswith(clocked)}
            for row in self.folder.read_metrics()
        ]


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.communicate()[0]}")
        try:
            if found := what():
                return found
        except (FileNotFoundError, sa.exc.OperationalError):
            pass  # not there yet
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"waited in vain:\n{process.communicate()[0]}")


def test_a_run_leaves_everything_it_promised(tmp_path: Path) -> None:
    run = Run(tmp_path, "mixed").finish()
    rows = run.folder.read_metrics()
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert all(row.get("sampler_trainer/max_logprob_difference", 0.0) < 1e-4 for row in rows)
    assert run.folder.picture.read_bytes().startswith(b"\x89PNG")

    summary = json.loads(run.folder.summary.read_text())
    assert summary["calls"]["adds_up"]
    accounting = run.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0
    assert accounting.trained > 0
    assert accounting.proxied == 2 * 16 + 2 * 2
    assert accounting.skipped["evaluation"] == 4

    store = run.store()
    assert [v.version for v in store.latest_adapters(run.run_id)] == [2]
    calls = store.calls(rollout_ids=[r.id for r in store.rollouts(run.run_id, step=2)])
    trained_with = {c.adapter_version for c in calls if c.trained_step == 2}
    assert trained_with == {1}  # hot-swapped: step 2 was sampled by what step 1 made
    spans = store.spans(store.rollouts(run.run_id)[0].id)
    assert {"agentrl.reward"} < {span.name for span in spans}
    store.close()

    base = load_base("agentrl-tiny")
    model = PeftModel.from_pretrained(base.model, str(run.folder.adapter))
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert any(p.abs().max() > 0 for p in weights)
    assert "agentrl serve --adapter-path" in run.output


def test_a_killed_run_goes_on_where_it_was_and_curves_repeat(tmp_path: Path) -> None:
    """One runner, synchronous: two runs of a seed agree, though one was killed on the way."""
    (tmp_path / "whole").mkdir()
    settings = {"runners": 1, "steps": 4, "seed": 7, "eval_every": 2, "batch_size": 2}
    whole = Run(tmp_path / "whole", "mixed", **settings).finish()

    def checkpointed(run: Run) -> bool:
        return (run.folder.checkpoints / "step-00000002").exists()

    def evaluated(run: Run) -> bool:
        return any(r["step"] == 2 and "eval/accuracy" in r for r in run.folder.read_metrics())

    for moment in (checkpointed, evaluated):
        (tmp_path / moment.__name__).mkdir()
        killed = Run(tmp_path / moment.__name__, "mixed", **settings)
        process = killed.start()
        wait_for(functools.partial(moment, killed), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed.resume()

        assert killed.curve() == whole.curve()
        assert [r["step"] for r in killed.curve() if "reward/mean" in r] == [1, 2, 3, 4]
        one, other = (
            (run.folder.adapter / "adapter_model.safetensors").read_bytes()
            for run in (whole, killed)
        )
        assert one == other
        assert killed.accounting().adds_up
        assert killed.accounting().pending == 0


def test_gateway_and_runner_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, "slow", runners=4, steps=2)
    process = run.start()

    def running(column: sa.Column[Any]) -> list[Any]:
        store = run.store()
        with store.db.read() as c:
            query = sa.select(column).where(tables.attempts.c.state == AttemptState.RUNNING)
            purpose = tables.rollouts.c.purpose == Purpose.TRAIN
            query = query.join(
                tables.rollouts, tables.rollouts.c.id == tables.attempts.c.rollout_id
            ).where(purpose)
            found = list(c.execute(query).scalars())
        store.close()
        return found

    runner = wait_for(lambda: running(tables.attempts.c.runner), process)[0]
    _host, pid, _index = runner.rsplit("-", 2)  # see Worker.name
    os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)
    store = run.store()
    with store.db.read() as c:
        gateway = c.execute(sa.select(tables.gateways.c.pid)).scalars().all()[-1]
    os.kill(gateway, signal.SIGKILL)
    run.finish(process)

    accounting = run.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0
    assert len(store.gateway_boots(run.run_id)) == 2
    rollouts = store.rollouts(run.run_id)
    assert {r.state for r in rollouts} == {RolloutState.SUCCEEDED}
    states = [a.state for a in store.attempts([r.id for r in rollouts])]
    assert AttemptState.LOST in states
    winners = {r.winner for r in rollouts}
    trained = [c for c in store.calls(rollout_ids=[r.id for r in rollouts]) if c.trained_step]
    assert trained
    assert {c.attempt_id for c in trained} <= winners
    # Both calls of a winner train, or neither: no half attempt.
    for attempt in {c.attempt_id for c in trained}:
        both = [c for c in store.calls(attempt_ids=[attempt]) if c.skip_reason is None]
        assert len(both) == 2
    store.close()


def test_runners_are_killed_at_random_and_no_half_attempt_trains(tmp_path: Path) -> None:
    """Several ``kill -9``, of runners and of the agents themselves, whenever they come."""
    rng = random.Random(4)
    run = Run(tmp_path, "slow", runners=4, steps=1, lease=3, on_error="retry", max_attempts=9)
    process = run.start()

    def busy() -> list[int]:
        """Runners that execute a training rollout right now."""
        store = run.store()
        rollouts = store.rollouts(run.run_id, step=1, purpose=Purpose.TRAIN)
        attempts = store.attempts([r.id for r in rollouts])
        store.close()
        running = [a.runner for a in attempts if a.state is AttemptState.RUNNING]
        return [int(runner.rsplit("-", 2)[1]) for runner in running]  # see Worker.name

    wait_for(busy, process, 120)
    killed = 0
    while process.poll() is None and killed < 6:
        time.sleep(rng.uniform(0.1, 0.5))
        victims = [pid for worker in busy() for pid in (worker, *_children(worker))]
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed += 1
    run.finish(process)
    assert killed > 2

    accounting = run.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0
    store = run.store()
    rollouts = store.rollouts(run.run_id)
    assert {r.state for r in rollouts} == {RolloutState.SUCCEEDED}
    attempts = store.attempts([r.id for r in rollouts])
    assert AttemptState.RUNNING not in {a.state for a in attempts}
    winners = {r.winner for r in rollouts}
    calls = store.calls(rollout_ids=[r.id for r in rollouts])
    trained = {c.attempt_id for c in calls if c.trained_step is not None}
    assert trained
    assert trained <= winners
    for attempt in winners:  # both calls of a winner are judged alike
        verdicts = {c.skip_reason for c in calls if c.attempt_id == attempt}
        assert len([c for c in calls if c.attempt_id == attempt]) == 2
        assert len(verdicts) == 1
    store.close()


def _children(pid: int) -> list[int]:
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in table.stdout.splitlines()]
    return [child for child, parent in rows if parent == pid]


def test_every_failure_is_counted_under_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path, "troubled", steps=2, batch_size=10, max_attempts=2, runners=3).finish()
    accounting = run.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0
    expected = {
        "failed_rollout",
        "no_reward",
        "not_trainable_model",
        "zero_advantage",
        "evaluation",
    }
    assert expected <= set(accounting.skipped)
    assert accounting.trained > 0
    assert "rollouts failed" in run.output
    assert "emitted no reward" in run.output


def test_policies_are_counted_and_shown(tmp_path: Path) -> None:
    settings = {"on_error": -1, "on_missing_reward": "retry", "max_attempts": 2}
    run = Run(tmp_path, "troubled", steps=1, batch_size=10, runners=3, **settings).finish()
    [row] = [row for row in run.folder.read_metrics() if "reward/mean" in row]
    tasks = [n % 5 for n in _tasks_of(run, step=1)]
    assert row["rewards/on_error"] == row["attempts/error"] == 4 * tasks.count(0)
    assert row["attempts/no_reward"] == row["reward/missing"] == 4 * tasks.count(1)
    assert row["rollouts/failed"] == 0
    assert "got their reward from on_error" in run.output
    assert run.accounting().adds_up
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl", "runs", "show", str(run.folder.root)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "attempts: no_reward" in shown
    assert "rewards by policy: on_error" in shown


def _tasks_of(run: Run, step: int) -> list[int]:
    """``n`` of each task of a step."""
    store = run.store()
    with store.db.read() as c:
        query = (
            sa.select(tables.tasks.c.data)
            .join(tables.rollouts, tables.rollouts.c.task_id == tables.tasks.c.id)
            .where(tables.rollouts.c.step == step, tables.rollouts.c.purpose == Purpose.TRAIN)
            .where(tables.rollouts.c.index == 0)
        )
        found = [data["n"] for data in c.execute(query).scalars()]
    store.close()
    return found


def test_a_return_value_is_a_reward(tmp_path: Path) -> None:
    run = Run(tmp_path, "asynchronous", steps=1).finish()
    assert run.curve()[1]["reward/missing"] == 0
    assert run.accounting().trained > 0


def test_attempts_that_share_a_process_stay_apart(tmp_path: Path) -> None:
    run = Run(tmp_path, "identified", steps=1, rollouts_per_process=8).finish()
    assert run.accounting().adds_up
    store = run.store()
    rollouts = store.rollouts(run.run_id)
    pids: set[float] = set()
    for rollout in rollouts:
        earned = {r.name: r.value for r in store.rewards([rollout.id])}
        (call,) = store.calls(rollout_ids=[rollout.id])
        assert call.request is not None
        assert f"Say you are {earned['n']:.0f}." in str(call.request["messages"])
        roots = [s for s in store.spans(rollout.id) if s.name.startswith("invoke_workflow")]
        assert [s.attributes["agentrl.rollout.id"] for s in roots] == [rollout.id]
        pids.add(earned["pid"])
    assert 1 < len(pids) < len(rollouts)
    store.close()


def test_nothing_is_older_than_max_staleness_by_default(tmp_path: Path) -> None:
    """Nor of a group that takes as long as several steps; the first one of these tasks does."""
    run = Run(
        tmp_path, "now_and_then_slow", steps=4, batch_size=2, group_size=2, runners=4,
        max_staleness=1, eval_every=4,
    ).finish()  # fmt: skip
    rows = [row for row in run.folder.read_metrics() if "reward/mean" in row]
    assert max(row["staleness/max"] for row in rows) == 1
    assert all(row["staleness/beyond"] == 0 for row in rows)
    assert "correction/weight" in rows[1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_agent_that_never_works_ends_the_run_with_its_error(tmp_path: Path, ahead: int) -> None:
    run = Run(tmp_path, "always_broken", max_attempts=1, runners=2, max_staleness=ahead)
    process = run.start()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "every rollout of the step failed" in output
    assert "no such luck" in output
