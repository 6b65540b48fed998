"""Whole runs that a guard ends, and that go on."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from documented_metrics import undocumented
from provider_servers import FaultyServer, said
from training_run import Run

from agentrl.runs.best_adapter import best_step, held_out_of
from agentrl_tracer.schemas import Purpose

pytestmark = [pytest.mark.guards, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / "tests" / "support" / "gaming_agents.py"
LIMIT = "AGENTRL_GUARDS__MAX_RUN_TOKENS"


def summary(run: Run) -> dict[str, Any]:
    return json.loads(run.folder.summary.read_text())


def tokens(run: Run, **which: Any) -> int:
    return sum(len(call.prompt_ids) + len(call.response_ids) for call in run.calls(**which))


def test_a_budget_ends_a_run_in_order_and_it_goes_on_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: in the middle of a step, and before one that does not fit."""
    settings: dict[str, Any] = {
        "runners": 1, "steps": 3, "seed": 5, "batch_size": 2, "group_size": 3, "eval_every": 3,
    }  # fmt: skip
    whole = Run(tmp_path / "whole", "slow", **settings).finish()
    evaluation = tokens(whole, step=0, purpose=Purpose.EVAL)
    step = tokens(whole, step=1, purpose=Purpose.TRAIN)

    run = Run(tmp_path / "run", "slow", **settings)
    monkeypatch.setenv(LIMIT, str(evaluation + step // 2))
    run.finish()
    assert "tokens are spent; the rollouts under way were given up" in run.output
    assert (summary(run)["steps"], summary(run)["ended_by"]) == (0, "guards.max_run_tokens")
    assert run.steps() == []
    assert 0 < run.accounting().skipped["superseded"] < 12
    spent = summary(run)["spent"]["tokens"]
    assert spent >= evaluation + step // 2

    # Room for one more step with an evaluation, and not for two.
    monkeypatch.setenv(LIMIT, str(int(spent + 1.5 * step + evaluation)))
    run.finish()
    assert (summary(run)["steps"], summary(run)["ended_by"]) == (1, "guards.max_run_tokens")
    assert "are spent, and one more step may take" in run.output
    assert [at for at, _ in summary(run)["held_out"]] == [0, 1]
    assert summary(run)["spent"]["tokens"] <= spent + 1.5 * step + evaluation

    monkeypatch.setenv(LIMIT, str(10**9))
    run.finish(run.start("-m", "agentrl"))
    assert run.weights() == whole.weights()
    steps = [[row for row in one.curve() if "reward/mean" in row] for one in (run, whole)]
    assert steps[0] == steps[1]
    run.accounting()


def test_hours_end_a_run_in_order_and_count_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "slow", steps=1, eval_every=1, batch_size=2, group_size=2).finish()
    before = summary(run)["spent"]["hours"]
    limit = before + 20 / 3600
    monkeypatch.setenv("AGENTRL_GUARDS__MAX_HOURS", str(limit))
    run.changes = ["--steps", "1000"]
    run.finish()
    ended = summary(run)
    assert ended["ended_by"] == "guards.max_hours"
    assert "hours are spent" in run.output
    assert 1 <= ended["steps"] < 1000
    assert before < ended["spent"]["hours"] < limit + 60 / 3600
    assert (run.folder.best_adapter / "adapter_model.safetensors").is_file()
    run.accounting()
    # Spent before it starts again, it makes no step.
    monkeypatch.setenv("AGENTRL_GUARDS__MAX_HOURS", str(before))
    run.finish()
    assert (summary(run)["ended_by"], summary(run)["steps"]) == ("guards.max_hours", ended["steps"])


def test_rollouts_that_begin_during_the_last_evaluation_are_spent(tmp_path: Path) -> None:
    settings = {"runners": 3, "eval_every": 1, "evaluation.stop_at": 0}  # for 2 held-out tasks
    run = Run(tmp_path, f"{AGENTS}:late_when_held_out", **settings)
    run.finish()
    assert (summary(run)["steps"], summary(run)["ended_by"]) == (0, "evaluation.stop_at")
    assert summary(run)["spent"]["tokens"] > tokens(run, step=0, purpose=Purpose.EVAL)
    run.accounting()


def test_what_was_under_way_when_a_run_was_stopped_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, str(10**9))
    run = Run(tmp_path, "slow", steps=1)
    run.kill_at("rollouts", 1, signal.SIGTERM)
    spent = json.loads(run.folder.spent.read_text())["tokens"]
    assert tokens(run, step=0) < spent <= tokens(run)


@pytest.mark.parametrize(
    ("ended_by", "settings", "said"),
    [
        ("evaluation.stop_at", {"evaluation.stop_at": 0.9}, "has reached 90.0%"),
        (
            "evaluation.patience",
            {"evaluation.patience": 2, "learning_rate": 1e-9},
            "2 evaluations were no better than 0.0% at step 0",
        ),
    ],
)
def test_held_out_tasks_end_a_run_early(
    ended_by: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run = on_hello(tmp_path, steps=100, eval_every=2, **settings).finish()
    assert said in " ".join(run.output.split())
    ended, held_out = summary(run), held_out_of(run.folder)
    assert (ended["ended_by"], ended["steps"]) == (ended_by, max(held_out))
    assert 0 < ended["steps"] < 100
    assert len(run.steps()) == ended["steps"]
    *before, last = (held_out[step] for step in sorted(held_out))
    if ended_by == "evaluation.stop_at":
        assert max(before) < 0.9 <= last
    else:
        assert [*before, last] == [0.0] * 3
    best = best_step(held_out)
    assert best is not None
    assert ended["best"] == [best, held_out[best]]
    version, kept = run.folder.adapter_version("policy", best), run.folder.best_adapter
    file = "adapter_model.safetensors"
    assert (kept / file).read_bytes() == (version / file).read_bytes()
    run.accounting()


def on_hello(folder: Path, **settings: Any) -> Run:
    hello = ROOT / "examples" / "hello"
    return Run(
        folder, f"{hello / 'agent.py'}:agent", tasks=hello / "train.jsonl",
        eval_tasks=hello / "held_out.jsonl", batch_size=8, group_size=8,
        rollouts_per_process=50, **settings,
    )  # fmt: skip


def collapsing(folder: Path, **settings: Any) -> Run:
    """At this learning rate the second update makes noise of every answer."""
    return on_hello(
        folder, eval_every=1, learning_rate=0.1,
        **{"guards.on_collapse": "roll_back", "run.keep_checkpoints": 1} | settings,
    )  # fmt: skip


def test_a_run_that_collapses_goes_back_to_its_best_step(tmp_path: Path) -> None:
    run = collapsing(tmp_path, steps=8, **{"guards.roll_backs": 1})
    process = run.start()
    states = list[str]()

    def watch() -> None:
        while process.poll() is None:
            with contextlib.suppress(Exception), run.store() as store:
                states.append(store.runs()[0]["state"])
            time.sleep(0.2)

    watching = threading.Thread(target=watch)
    watching.start()
    run.finish(process)
    watching.join()
    ran = len(states) - states[::-1].index("running")
    assert set(states[:ran]) == {"running"}  # or runners elsewhere would leave
    assert "note: alert/" in run.output
    assert run.output.count("going back to step") == 1
    assert "learning.learning_rate 0.1 → 0.05, guards.roll_backs 1 → 0" in run.output
    [back] = [row for row in run.curve() if "went_back_from" in row]
    assert back["went_back_from"] > back["step"] > 0
    assert run.folder.read_config()["learning"]["learning_rate"] == 0.05
    for row in run.steps():
        assert row["learning_rate"] == (0.1 if row["step"] <= back["step"] else 0.05)
    assert run.accounting().skipped["superseded"] > 0
    assert undocumented(run.folder.read_metrics()) == {}
    best = best_step(held_out_of(run.folder)) or 0
    kept = (run.folder.best_adapter / "adapter_model.safetensors").read_bytes()
    version = run.folder.adapter_version("policy", best)
    assert kept == (version / "adapter_model.safetensors").read_bytes()
    assert (run.folder.checkpoints / f"step-{best:08d}").is_dir()


COLLAPSES = """
import sys, agentrl

class Collapsing(agentrl.Trainer):
    def train_step(self, step):
        super().train_step(step)
        self.guards.held_out = {0: 0.0, 1: 1.0}
        self.guards._collapse = "alert/truncation" if step == self.steps else None

ended = agentrl.train(*sys.argv[2:], trainer=Collapsing).ended
print(ended.sentence, ended.rolls_back)
"""


def test_a_run_that_collapses_in_its_last_step_ends_so(tmp_path: Path) -> None:
    run = Run(tmp_path, "slow", **{"guards.on_collapse": "roll_back"})
    run.finish(run.start("-c", COLLAPSES))
    assert "alert/truncation; going back to step 1, with the learning rate" in run.output
    assert summary(run)["steps"] == 2
    with run.store() as store:  # in Python, the caller goes back
        assert store.runs()[0]["state"] == "finished"


def test_dollars_end_a_run_with_its_best_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At LiteLLM's price of gpt-4o-mini, of a server that tells how many tokens it took."""
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-judge")
    usage = {"prompt_tokens": 1000, "completion_tokens": 1000, "total_tokens": 2000}
    provider = FaultyServer((200, said("yes") | {"model": "gpt-4o-mini", "usage": usage}))
    judge = {"model": "openai/gpt-4o-mini", "api_base": provider.url, "api_key_env": "JUDGE_KEY"}
    run = Run(
        tmp_path, f"{AGENTS}:judged", steps=50, eval_every=1, rollouts_per_process=50,
        **{"models": json.dumps({"judge": judge}), "guards.max_cost": 0.05},
    )  # fmt: skip
    run.finish()
    provider.close()
    price = (1000 * 0.15 + 1000 * 0.6) / 1e6
    spent = summary(run)["spent"]["dollars"]
    assert spent == pytest.approx(len(provider.seen) * price)
    # Each step asks it 16 times, and each evaluation twice: one more would not fit.
    assert 0.05 - 18 * price < spent <= 0.05
    assert summary(run)["ended_by"] == "guards.max_cost"
    assert "dollars are spent, and one more step may take 0.0135" in run.output
    assert (run.folder.best_adapter / "adapter_model.safetensors").is_file()
    run.accounting()


@pytest.mark.parametrize(
    ("agent", "alerts", "settings"),
    [
        ("longer", {"length_growth", "truncation"}, {"learning_rate": 1e-2}),
        ("parrot", {"repeated_answers"}, {"learning_rate": 1e-2}),
        (
            "longer",
            {"kl_explosion"},
            {"learning_rate": 2e-2, "learning.epochs": 4, "algorithm.loss": "ppo"},
        ),
        ("memorized", {"held_out_falls"}, {"learning_rate": 5e-3, "eval_every": 4}),
    ],
)
def test_runs_that_game_their_reward_are_told(
    agent: str, alerts: set[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    held_out = tmp_path / "never_trained_on.jsonl"
    held_out.write_text("".join(f'{{"n": {n}}}\n' for n in range(1000, 1024)))
    run = Run(
        tmp_path, f"{AGENTS}:{agent}", steps=12,
        batch_size=8, group_size=8, rollouts_per_process=100, eval_tasks=held_out,
        **{"eval_every": 12} | settings,
    )  # fmt: skip
    run.finish()
    told = {
        line.split(":")[1].strip() for line in run.output.splitlines() if "note: alert/" in line
    }
    assert {f"alert/{name}" for name in alerts} <= told
