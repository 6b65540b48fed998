"""A step in numbers: what each epoch saw, and the time of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from call_records import make, rollout
from documented_metrics import documented, undocumented
from small_learner import one_step

from agentrl.training.metrics import PrefixHits, count_failures, step_row
from agentrl.training.queue.rollout_queue import StepRollouts
from agentrl.training.queue.staleness import StalenessLimit
from agentrl_tracer.schemas import Call, NewRollout, Outcomes, Purpose, RolloutState
from agentrl_tracer.store import Store
from agentrl_trainer.data.adapter_split import AdapterBatches
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.step_stats import StepStats
from agentrl_trainer.models.loading import load_base


def learned(epochs: int) -> list[StepStats]:
    """Passes of PPO over two tokens, one good and one bad, with steps that leave the bounds."""
    learner = Learner(
        load_base("agentrl-tiny", device="cpu"), rank=4, adam=AdamParams(learning_rate=5e-3)
    )
    rows = [
        TrainingRow([5, 6, token], [False, False, True], [0.0] * 3, [0.0, 0.0, advantage])
        for token, advantage in ((7, 1.0), (8, -1.0))
    ]
    sampled = learner.forward(rows)
    rows = [replace(row, logprobs=lp) for row, lp in zip(rows, sampled, strict=True)]
    return [one_step(learner, rows, "ppo") for _ in range(epochs)]


def row_of(
    passes: dict[str, list[StepStats]],
    taken: StepRollouts | None = None,
    calls: Sequence[Call] = (),
) -> dict[str, Any]:
    batches = AdapterBatches({name: StepBatch() for name in passes}, StepBatch())
    outcomes, taken = Outcomes({}, {}, {}), taken or StepRollouts([], {})
    return step_row(3, taken, calls, batches, passes, outcomes, StalenessLimit())


@pytest.fixture(scope="module")
def four() -> list[StepStats]:
    return learned(4)


def test_the_last_epoch_tells_what_was_clipped(four: list[StepStats]) -> None:
    row = row_of({"policy": four})
    # Before any update the policy is the one that sampled: nothing could be clipped.
    assert row["clip_fraction"] == 0.0
    assert row["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert row["last_epoch/clip_fraction"] == four[-1].clip_fraction > 0
    assert row["last_epoch/ratio/max"] == four[-1].ratio_max > 1.2
    assert row["last_epoch/grad_norm"] == four[-1].grad_norm
    assert row["entropy"] == four[0].entropy != row["last_epoch/entropy"]
    assert undocumented([row]) == {}
    once = row_of({"policy": four[:1]})
    assert not [name for name in once if name.startswith("last_epoch/")]
    assert once["loss"] == four[0].loss


def test_each_adapter_has_its_own(four: list[StepStats]) -> None:
    row = row_of({"asker": four, "answerer": []})
    assert row["asker/last_epoch/clip_fraction"] == four[-1].clip_fraction
    assert "answerer/loss" not in row
    assert undocumented([row], ["asker", "answerer"]) == {}


def test_tokens_per_second_are_by_when_the_steps_own_rollouts_ran(store: Store) -> None:
    """Asynchronously they ran before this step, which had to wait for none of them."""
    run_id = store.create_run("run", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    new = [NewRollout(task, "group", Purpose.TRAIN, 3, i, seed=i, sampling={}) for i in range(4)]
    times = [(100.0, 104.0), (102.0, 106.0), (110.0, 112.0), (None, None)]
    rollouts = [
        replace(rollout, started_at=start, ended_at=end)
        for rollout, (start, end) in zip(
            store.rollouts(run_id, ids=store.enqueue(run_id, new)), times, strict=True
        )
    ]
    taken = StepRollouts(rollouts, {"groups/ahead": 5})
    row = row_of({"policy": []}, taken, [make("a", [1], [5] * 20), make("b", [1], [5] * 60)])
    assert row["tokens_per_second"] == pytest.approx(80 / (6 + 2))


@pytest.mark.parametrize(
    ("reason", "said"),
    [("a\nValueError: no\n", "ValueError: no"), (" \n", "failed"), (None, "failed")],
)
def test_a_failure_is_counted_by_its_last_line(reason: str | None, said: str) -> None:
    failed = replace(rollout("r"), state=RolloutState.FAILED, reason=reason)
    assert count_failures([failed, failed, rollout("s")]) == {said: 2}


def test_the_page_names_nothing_twice() -> None:
    names = documented()
    assert len(names) == len(set(names)) > 60


def test_the_share_of_prompts_from_the_prefix_cache() -> None:
    hits = PrefixHits()
    embedded = {"prefill_tokens": 100, "reused_tokens": 300}
    assert hits.metrics([{"sampler": embedded}]) == {
        "tokens/prompts": 400,
        "tokens/prompts_reused": 0.75,
    }
    assert hits.metrics([{"sampler": embedded}]) == {}  # nothing was asked since
    assert hits.metrics([None]) == {}
    again = {"prefill_tokens": 30, "reused_tokens": 10}  # of a new process
    assert hits.metrics([{"sampler": again}])["tokens/prompts_reused"] == 0.25
    both = hits.metrics(
        [{"sampler": {"prefill_tokens": 40, "reused_tokens": 30}}, {"sampler": again}]
    )
    assert both == {"tokens/prompts": 70, "tokens/prompts_reused": 30 / 70}
    vllm = PrefixHits().metrics([{"sampler": {"prompt_tokens": 200, "reused_tokens": 150}}])
    assert vllm == {"tokens/prompts": 200, "tokens/prompts_reused": 0.75}
    assert PrefixHits().metrics([{"sampler": {"sampler": "tinker"}}]) == {}
