"""Whole runs, with gateway, sampler, runners and trainer as processes; and parts of a step."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from call_records import make
from peft import PeftModel
from settings import nested
from store_records import record_spans
from training_run import Run, children, wait_for

from agentrl.config.commands import TrainConfig
from agentrl.timing import PhaseTimer
from agentrl.training.step_records import StepRecords
from agentrl.training.update import update
from agentrl_tracer.schemas import (
    AttemptState,
    NewRollout,
    Purpose,
    Reward,
    RolloutState,
    SkipReason,
)
from agentrl_tracer.store import Store, tables
from agentrl_trainer.client import ServiceClient
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.models.loading import load_base

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of an async agent that returns its reward, in processes that are reused."""
    folder = tmp_path_factory.mktemp("trained")
    return Run(folder, "asynchronous", rollouts_per_process=8).finish()


def test_a_run_leaves_everything_it_promised(trained: Run) -> None:
    rows = trained.folder.read_metrics()
    assert [row["step"] for row in trained.steps()] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert all(row.get("sampler_trainer/max_logprob_difference", 0.0) < 1e-4 for row in rows)
    assert trained.folder.picture.read_bytes().startswith(b"\x89PNG")
    summary = json.loads(trained.folder.summary.read_text())
    assert summary["calls"]["adds_up"]
    assert (summary["best"], summary["ended_by"]) == ([0, 1.0], None)
    phases = {"start", "rollouts", "update", "checkpoint", "publish", "evaluation"}
    assert summary["cores_busy"].keys() == summary["seconds"].keys() == phases
    assert 0 < summary["cores_busy"]["start"] <= 1
    assert (trained.folder.best_adapter / "adapter_config.json").is_file()
    sampled = sum(len(call.prompt_ids) + len(call.response_ids) for call in trained.calls())
    assert summary["spent"]["tokens"] == sampled
    assert json.loads(trained.folder.spent.read_text())["tokens"] == sampled
    assert all(row["answers/tokens"] > 0 for row in trained.steps())
    accounting = trained.accounting()
    assert accounting.trained > 0
    assert accounting.proxied == 2 * 16 + 2 * 2
    assert accounting.skipped["evaluation"] == 4
    assert "agentrl serve --adapter-path" in trained.output

    base = load_base("agentrl-tiny")
    model = PeftModel.from_pretrained(base.model, str(trained.folder.adapter))
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert any(p.abs().max() > 0 for p in weights)


def test_a_step_is_sampled_by_the_version_that_the_step_before_published(trained: Run) -> None:
    with trained.store() as store:
        assert [v.version for v in store.latest_adapters(trained.run_id)] == [2]
        rollouts = store.rollouts(trained.run_id, step=2, purpose=Purpose.TRAIN)
        calls = store.calls(rollout_ids=[rollout.id for rollout in rollouts])
    assert {call.adapter_version for call in calls if call.trained_step == 2} == {1}


def test_a_return_value_is_a_reward(trained: Run) -> None:
    assert [row["reward/missing"] for row in trained.steps()] == [0, 0]


def test_attempts_that_share_a_process_stay_apart(trained: Run) -> None:
    pids: set[str] = set()
    with trained.store() as store:
        rollouts = store.rollouts(trained.run_id, purpose=Purpose.TRAIN)
        for rollout in rollouts:
            [attempt] = store.attempts([rollout.id])
            n, pid = Path(attempt.log or "").read_text().split()
            [call] = store.calls(rollout_ids=[rollout.id])
            assert f"Say you are {n}." in str(call.request)
            roots = [s for s in store.spans(rollout.id) if s.name.startswith("invoke_workflow")]
            assert [s.attributes["agentrl.rollout.id"] for s in roots] == [rollout.id]
            pids.add(pid)
    assert 1 < len(pids) < len(rollouts)


def test_a_steps_rollouts_wait_while_the_evaluation_before_it_runs(trained: Run) -> None:
    with trained.store() as store:
        evaluated = store.rollouts(trained.run_id, step=0, purpose=Purpose.EVAL)
        queued = store.rollouts(trained.run_id, step=1, purpose=Purpose.TRAIN)
    ended = [rollout.ended_at for rollout in evaluated if rollout.ended_at is not None]
    assert max(rollout.created_at for rollout in queued) < max(ended)


def test_gateway_runners_and_agents_are_killed_and_no_half_attempt_trains(tmp_path: Path) -> None:
    rng = random.Random(4)
    run = Run(tmp_path, "slow", runners=4, steps=1, on_error="retry", max_attempts=9)
    process = run.start()

    def busy() -> list[int]:
        """Return the runners that execute a training rollout right now."""
        with run.store() as store:
            rollouts = store.rollouts(run.run_id, step=1, purpose=Purpose.TRAIN)
            attempts = store.attempts([r.id for r in rollouts])
        running = [a.runner for a in attempts if a.state is AttemptState.RUNNING]
        return [int(runner.rsplit("-", 2)[1]) for runner in running]  # see Worker.name

    os.kill(wait_for(busy, process, 120)[0], signal.SIGKILL)
    time.sleep(0.5)
    with run.store() as store, store.db.read() as c:
        gateway = c.execute(sa.select(tables.gateways.c.pid)).scalars().all()[-1]
    os.kill(gateway, signal.SIGKILL)
    wait_for(busy, process, 120)
    killed = 0
    while process.poll() is None and killed < 4:
        time.sleep(rng.uniform(0.1, 0.5))
        victims = [pid for worker in busy() for pid in (worker, *children(worker))]
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed += 1
    run.finish(process)
    assert killed > 2

    run.accounting()
    with run.store() as store:
        boots = sa.select(tables.gateways).where(tables.gateways.c.run_id == run.run_id)
        assert len(store.db.fetch(boots)) == 2
        rollouts = store.rollouts(run.run_id)
        attempts = store.attempts([r.id for r in rollouts])
        calls = store.calls(rollout_ids=[r.id for r in rollouts])
    assert {r.state for r in rollouts} == {RolloutState.SUCCEEDED}
    states = {a.state for a in attempts}
    assert states & {AttemptState.INFRASTRUCTURE, AttemptState.LOST}
    assert AttemptState.RUNNING not in states
    winners = {r.winner for r in rollouts}
    trained = {c.attempt_id for c in calls if c.trained_step is not None}
    assert trained
    assert trained <= winners
    for attempt in winners:  # both calls of a winner are there, and judged alike
        own = [c for c in calls if c.attempt_id == attempt]
        assert len(own) == 2
        assert len({(c.trained_step, c.skip_reason) for c in own}) == 1


SIX = {"task_count": 6, "batch_size": 6, "steps": 1, "runners": 3, "max_attempts": 2}
"""One task of each kind of ``troubled``."""


def test_every_failure_is_counted_under_its_name(tmp_path: Path) -> None:
    """And one rollout's numbers hurt no other: temperatures and rewards that overflow."""
    run = Run(tmp_path, "troubled", **SIX | {"task_count": 9, "batch_size": 9}).finish()
    accounting = run.accounting()
    [row] = run.steps()
    assert row["step_refused"] == 0.0
    assert row["off_policy/greedy"] == accounting.skipped["refused_reward"] == 4
    assert "4 calls do not train, because a reward was refused" in run.output
    expected = {
        "failed_rollout", "no_reward", "not_trainable_model", "zero_advantage", "evaluation",
    }  # fmt: skip
    assert expected <= set(accounting.skipped)
    assert accounting.trained > 0
    assert "rollouts failed" in run.output
    assert "have no reward" in run.output


def test_policies_are_counted_and_shown(tmp_path: Path) -> None:
    run = Run(tmp_path, "troubled", on_error=-1, on_missing_reward="retry", **SIX).finish()
    [row] = run.steps()
    assert row["reward/without_call"] == 4
    assert row["reward/mean"] < 5
    assert "4 of 24 rollouts earned a reward without asking the model" in run.output
    assert row["rewards/on_error"] == row["attempts/error"] == 4
    assert row["attempts/no_reward"] == row["reward/missing"] == 4
    assert row["rollouts/failed"] == 0
    assert "got their reward from on_error" in run.output
    # On one line: what the first of them said, and where the rest is.
    [said] = [line for line in run.output.splitlines() if "attempts failed (" in line]
    assert re.search(r", the first: \w*Error: .* \(its output: .*/logs/.*\.log\)", said), said
    run.accounting()
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl", "runs", "show", str(run.folder.root)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.search(r"attempts .*\d no_reward", shown)
    assert re.search(r"rewards by policy .*\d on_error", shown)


def test_a_run_without_rewards_says_that_nothing_trained(tmp_path: Path) -> None:
    settings = {"runners": 1, "batch_size": 2, "group_size": 2, "steps": 1, "eval_every": 9}
    run = Run(tmp_path, "thankless", **settings).finish(code=1)
    output = " ".join(run.output.replace("│", " ").split())
    assert "nothing was learned: 0 of 4 calls trained" in output
    assert "4 no_reward: their rollouts emitted no reward" in output
    assert "nan" not in output
    assert "agentrl serve" not in output
    strictly = functools.partial(json.loads, parse_constant=pytest.fail)  # neither NaN nor infinity
    rows = [strictly(line) for line in run.folder.metrics.read_text().splitlines()]
    assert [row["reward/mean"] for row in rows if "reward/mean" in row] == [None]
    assert strictly(run.folder.summary.read_text())["reward"] == [None]
    for meta in run.folder.checkpoints.glob("*/meta.json"):
        strictly(meta.read_text())
    assert run.folder.picture.is_file()


def test_an_agent_that_never_works_ends_the_run_with_its_error(tmp_path: Path) -> None:
    """Also while rollouts of the next step are under way."""
    run = Run(tmp_path, "always_broken", max_attempts=1, max_staleness=1, eval_every=9)
    run.finish(code=1)
    assert "every rollout of the step failed" in run.output
    assert "no such luck" in run.output
    assert "None of them reached the model: it is at OPENAI_BASE_URL" in run.output
    assert ", the end of one:\n  Traceback" in run.output


# ---- one step, by the run's settings


@pytest.mark.parametrize(("max_staleness", "dropped"), [(1, {0, 1}), (2, {0})])
def test_what_is_older_than_max_staleness_is_dropped(
    store: Store, max_staleness: int, dropped: set[int]
) -> None:
    """Step 4 trains version 3: what version v answered is 3 - v versions old."""
    run_id = store.create_run("run", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    new = [NewRollout(task, "group", Purpose.TRAIN, 4, i, seed=i, sampling={}) for i in range(4)]
    ids = store.enqueue(run_id, new)
    version_of: dict[str, int] = {}
    for version in range(4):
        claim = store.claim("runner", 60, run_id)
        assert claim is not None
        key = claim.attempt_id
        one = make(
            f"c{version}", [1], [10 + version, 5], adapter="policy", adapter_version=version,
            run_id=run_id, rollout_id=claim.rollout_id, attempt_id=key,
        )  # fmt: skip
        store.write_calls("boot", [], [one], 1, wait=True)
        earned = float(version % 2)
        record_spans(store, [], [Reward(key, claim.rollout_id, "reward", earned, key=key)])
        store.end_attempt(key, AttemptState.SUCCEEDED)
        version_of[one.id] = version
    config = TrainConfig(
        **nested(agent="x:y", tasks="tasks.jsonl", max_staleness=max_staleness, stale="drop")
    )
    records = StepRecords(config, store, max_length=64)
    calls, batches = records.assemble(4, store.rollouts(run_id, ids=ids))
    assert len(calls) == 4
    whole = batches.whole()
    assert {version_of[name] for name in whole.skipped} == dropped
    assert set(whole.skipped.values()) == {SkipReason.STALE}
    assert {version_of[name] for name in whole.trained} == {0, 1, 2, 3} - dropped


@pytest.mark.parametrize("bound", [0.0, 1e-3])
def test_max_grad_norm_reaches_the_optimizer(tmp_path: Path, bound: float) -> None:
    """AdamW's first momentum is a tenth of the gradient that it was given."""
    row = TrainingRow([5, 6, 7, 8], [False, True, True, True], [-1.0] * 4, [0.0, 1.0, -2.0, 1.0])
    config = TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl", max_grad_norm=bound))
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1)
        run: Any = SimpleNamespace(
            clients={"policy": client},
            config=config,
            learning_rate=lambda step: 1e-3,
            result=lambda asked: asked.result(),
        )
        [seen] = update(run, 1, "policy", StepBatch(rows=[row]), PhaseTimer())
        state = client.local(lambda learner: learner.state_dict()).result()
    momenta = [value for name, value in state.items() if name.startswith("exp_avg/")]
    given = torch.stack([value.norm() for value in momenta]).norm().item() / (1 - 0.9)
    assert seen.grad_norm is not None
    assert seen.grad_norm > 1e-2
    assert given == pytest.approx(bound or seen.grad_norm, rel=1e-4)


def test_a_row_that_is_not_finite_is_left_out_and_the_rest_of_the_step_trains(
    tmp_path: Path,
) -> None:
    mask = [False, True, True, True]
    good = TrainingRow([5, 6, 7, 8], mask, [-1.0] * 4, [0.0, 1.0, -2.0, 1.0])
    bad = TrainingRow([5, 6, 9, 8], mask, [-500.0] * 4, [0.0, 1.0, 1.0, 1.0])
    alone = StepBatch([good], [["c1"]], {"c1"}, owners=["r1"])
    mixed = StepBatch([bad, good], [["c0"], ["c1"]], {"c0", "c1"}, owners=["r0", "r1"])
    config, states, notes = TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl")), [], []
    with ServiceClient(folder=tmp_path) as service:
        for batch in (alone, mixed):
            client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1)
            run: Any = SimpleNamespace(
                clients={"policy": client},
                config=config,
                display=SimpleNamespace(note=notes.append),
                learning_rate=lambda step: 1e-3,
                result=lambda asked: asked.result(),
            )
            [seen] = update(run, 1, "policy", batch, PhaseTimer())
            assert not seen.skipped_non_finite
            found = client.local(lambda learner: learner.state_dict()).result()
            states.append([found[name] for name in sorted(found)])
            client.close().result()
    assert mixed.trained == {"c1"}
    assert mixed.skipped == {"c0": SkipReason.NON_FINITE}
    assert "1 of 2 rows of step 1 are left out" in notes[0]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
