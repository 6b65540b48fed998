"""What is wrong with answers and rewards is said from a threshold on, and not at every step."""

from __future__ import annotations

from typing import Any

import pytest
from call_records import make

from agentrl.findings import Finding, StepNotes, cut_off, equal_rewards, thinking
from agentrl_tracer.schemas import Call

OPENS, CLOSES = 90, 91


def calls(count: int, **changes: Any) -> list[Call]:
    return [make(f"c{at}", [1, 2], [3, 4], **changes) for at in range(count)]


def cut(count: int, limit: int) -> list[Call]:
    return calls(count, finish_reason="length", params={"max_tokens": limit})


@pytest.mark.parametrize(
    ("some", "fact", "fix"),
    [
        (calls(4), "no answer was cut off at max_tokens 256", ""),
        (cut(41, 256) + calls(23), "41 of 64 answers were cut off at max_tokens 256",
         "raise --max-tokens;"),
        (cut(7, 256) + calls(64), "7 of 71 answers were cut off at max_tokens 256", ""),
        (cut(8, 32) + calls(64), "8 of 72 answers were cut off at max_tokens 32",
         "raise what the agent requests;"),
        (cut(2, 31) + cut(2, 256), "4 of 4 answers were cut off at limits of their requests",
         "raise what the agent requests;"),
    ],
)  # fmt: skip
def test_cut_answers(some: list[Call], fact: str, fix: str) -> None:
    """A tenth is a problem, a few are not; the setting helps only where it is the limit."""
    found = cut_off(some, 256)
    assert found.fact.startswith(fact)
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


@pytest.mark.parametrize(
    ("groups", "fact", "fix"),
    [
        ([[0, 0]] * 50 + [[1, 1]] * 4 + [[0, 1]] * 10,
         "54 of 64 groups had equal rewards (50 of them 0, 4 of them 1)", "easier tasks"),
        ([[1, 1]] * 3 + [[0, 1]], "3 of 4 groups had equal rewards (3 of them 1)", "harder tasks"),
        ([[0.5, 0.5]] + [[0, 1]] * 2, "1 of 3 groups had equal rewards (1 of them 0.5)", ""),
        ([[0.1 + 0.2, 0.3]] * 2, "2 of 2 groups had equal rewards (2 of them 0.3)", "easier tasks"),
        ([[0, 1]] * 2, "all 2 groups had different rewards", ""),
    ],
)  # fmt: skip
def test_equal_rewards(groups: list[list[float]], fact: str, fix: str) -> None:
    """From half of the groups on it is a problem; what helps depends on whether they succeed."""
    found = equal_rewards(groups, 1.0)
    assert found.fact == fact
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


@pytest.mark.parametrize(
    ("prompt", "response", "reasoning"),
    [
        ([1], [OPENS, 5, 6, CLOSES, 7], 3),
        ([1, OPENS, 2], [5, 6, CLOSES, 7], 2),  # the prompt opened the thought
        ([1, OPENS, 2], [5, 6], 2),  # cut off within it
        ([1, OPENS, CLOSES], [5, 6], 0),  # and closed it: thinking is off
        ([OPENS, *range(9)], [5, 6], 0),  # of an earlier turn
        ([1], [CLOSES, OPENS, 6], 2),
    ],
)
def test_reasoning_is_counted_in_tokens(
    prompt: list[int], response: list[int], reasoning: int
) -> None:
    found = thinking([make("c", prompt, response)], ([OPENS], [CLOSES]), wanted=None)
    share = f"1 of 1 answers contain reasoning, {reasoning / len(response):.0%} of all"
    assert (share if reasoning else "no answer contains reasoning") in found.fact


def test_thinking_is_no_problem_where_it_is_wanted_or_rare() -> None:
    some = [make("a", [1, OPENS], [2, 3, CLOSES, 4]), *calls(1)]
    found = thinking(some, ([OPENS], [CLOSES]), wanted=None)
    assert found.fact == (
        "thinking is on: 1 of 2 answers contain reasoning, 33% of all sampled tokens"
    )
    assert "--sampler.thinking false" in found.fix
    assert thinking(some, ([OPENS], [CLOSES]), wanted=True).fix == ""
    assert thinking([*some, *calls(1)], ([OPENS], [CLOSES]), wanted=None).fix == ""


def test_a_problem_is_noted_when_it_is_new_and_when_it_lasts() -> None:
    said: list[str] = []
    notes = StepNotes(said.append)
    for step in range(5, 40):
        notes.take(step, {"a": Finding("fact", "fix" * (step > 5)), "b": Finding("all is well")})
    assert said == [f"step {step}: fact: fix" for step in (6, 31)]
