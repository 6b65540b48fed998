"""What a step's answers are like."""

from __future__ import annotations

from typing import Any

import pytest
from call_records import make, rollout

from agentrl.guards.answers import answer_metrics
from agentrl_tracer.schemas import Call, Rollout

ROLLOUTS = [rollout(f"r{i}", group=f"g{i // 2}", task=f"t{i // 2}") for i in range(8)]


def answers(*texts: list[int], **changes: Any) -> list[Call]:
    """One answer for each rollout."""
    return [
        make(
            f"c{i}", [1], text, rollout_id=f"r{i}", response_logprobs=[-0.5] * len(text), **changes
        )
        for i, text in enumerate(texts)
    ]


def measured(calls: list[Call], rewards: list[float | None], of: list[Rollout] = ROLLOUTS) -> Any:
    by_id = {one.id: reward for one, reward in zip(of, rewards, strict=False)}
    return answer_metrics(calls, of, by_id)


def test_length_entropy_and_what_is_cut_off() -> None:
    calls = [*answers([1, 2]), *answers([1, 2, 3, 4], finish_reason="length")]
    assert measured(calls, [1.0]) == {
        "answers/tokens": 3.0, "answers/cut_off": 0.5, "answers/entropy": 0.5,
    }  # fmt: skip


def test_equal_answers_count_over_whole_rollouts_of_four_tasks() -> None:
    same = [[5, 6]] * 6
    found = measured(answers(*same, [7], [8]), [1.0] * 8)
    assert found["answers/repeated"] == 6 / 8
    # A second answer tells two of them apart.
    more = [make("d", [1], [9], 1, rollout_id="r0", response_logprobs=[-0.5])]
    assert measured([*answers(*same, [7], [8]), *more], [1.0] * 8)["answers/repeated"] == 5 / 8
    assert "answers/repeated" not in measured(answers(*same), [1.0] * 8)  # three tasks


@pytest.mark.parametrize(("sign", "expected"), [(1, 1.0), (-1, -1.0)])
def test_length_pays_within_groups_only(sign: int, expected: float) -> None:
    """Between tasks, long answers may be the right ones."""
    texts = [[0] * n for n in (1, 2, 11, 12, 21, 22, 31, 32)]
    rewards = [9.0, 9.0 + sign, 6.0, 6.0 + sign, 3.0, 3.0 + sign, 0.0, 0.0 + sign]
    assert measured(answers(*texts), rewards)["answers/length_pays"] == pytest.approx(expected)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert "answers/length_pays" not in measured(answers(*[[1, 2]] * 8), [*range(8)])
    assert "answers/length_pays" not in measured(
        answers(*[[1] * n for n in range(1, 9)]), [1.0] * 8
    )
    assert "answers/length_pays" not in measured(
        answers(*[[1] * n for n in range(1, 9)]), [None] * 8
    )
    assert measured([], []) == {}
