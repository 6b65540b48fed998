"""What the scorer makes of functions' results, on recorded rollouts: rewards, none, or failures."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_records import call_of, claimed, start_run

from agentrl.rewards import Trace, group_reward
from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.scorer import Scorer, _event_loop
from agentrl.scoring.trace import read_traces
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN
from agentrl_tracer.schemas import AttemptState, Json, Policies, Reward, Rollout, Span
from agentrl_tracer.store import Store
from agentrl_tracer.store.calls import Delivery
from agentrl_trainer.data.rewards import rollout_reward

ANSWERS = ["one", "three", "eleven", "fourteen"]


def answered(store: Store, *said: str, **fields: Any) -> None:
    """Play a rollout: a conversation with these answers, and a reward that the agent emits."""
    claim, messages = claimed(store), list[Json]()
    for seq, text in enumerate(said):
        messages.append({"role": "user", "content": f"question {seq}"})
        answer = {"choices": [{"message": {"role": "assistant", "content": text, **fields}}]}
        call = call_of(
            claim, f"chatcmpl-{claim.attempt_id}-{seq}", seq=seq, response=answer,
            request={"messages": list(messages)}, response_logprobs=[-1.0],
        )  # fmt: skip
        store.write_calls("boot", [], [call], 1)
        messages.append({"role": "assistant", "content": text})
    emitted = Reward(claim.attempt_id, claim.rollout_id, "reward", 0.25, key="k")
    note = Span(
        "0" * 32, claim.attempt_id[:16], None, NOTE_SPAN, "internal", 1, 1, "unset",
        {NOTE_NAME: "found", NOTE_DATA: '{"pages": 3}'}, [], {}, claim.rollout_id, claim.attempt_id,
    )  # fmt: skip
    store.write_calls("boot", [], [Delivery(claim.attempt_id, [note], [emitted])], 0)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)


@pytest.fixture
def rollouts(store: Store) -> list[Rollout]:
    """A group that has ended; the second rollout asked twice."""
    run_id = start_run(store, 4)
    for at, text in enumerate(ANSWERS):
        answered(store, *(["before"] if at == 1 else []), text)
    return store.rollouts(run_id)


class Scored:
    """The rewards of each rollout by name, the totals, and what was said."""

    def __init__(self, store: Store, rollouts: Sequence[Rollout], notes: list[str]) -> None:
        kept = store.rewards([one.id for one in rollouts])
        self.notes = notes
        self.rewards = [
            {r.name: r.value for r in kept if r.rollout_id == one.id and r.name != "reward"}
            for one in rollouts
        ]
        self.totals = [
            rollout_reward(one, [r for r in kept if r.rollout_id == one.id]) for one in rollouts
        ]


Score = Callable[..., Scored]


@pytest.fixture
def score(store: Store, rollouts: list[Rollout], tmp_path: Path) -> Iterator[Score]:
    """Score the group with functions, each named as it is defined."""

    def run(*functions: Any, **how: Any) -> Scored:
        notes: list[str] = []
        context = ScoringContext(store, rollouts[0].run_id, tmp_path, notes.append)
        loaded = [RewardFunction(one.__name__, one) for one in functions]
        scorer = Scorer(loaded, context, **how)
        current = store.rollouts(rollouts[0].run_id)
        scorer.score(current, lambda done, total: None)
        scorer.close()
        return Scored(store, current, notes)

    return run


def size(trace: Trace) -> float:
    return len(trace.answer)


def test_a_trace_has_what_was_recorded(store: Store, rollouts: list[Rollout]) -> None:
    second = read_traces(store, rollouts)[1]
    assert second.task == {"n": 7}
    assert (second.answer, second.group_id) == ("three", "g")
    assert [one["content"] for one in second.messages] == [
        "question 0", "before", "question 1", "three",
    ]  # fmt: skip
    assert [call.seq for call in second.calls] == [0, 1]
    assert [one.value for one in second.rewards] == [0.25]
    assert second.notes == {"found": {"pages": 3}}


def test_results_add_to_what_the_agent_emitted(score: Score) -> None:
    async def named(trace: Trace) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"chars": len(trace.answer), "words": 1}

    found = score(size, named)
    assert found.rewards[0] == {"size": 3, "chars": 3, "words": 1}
    assert found.totals == [0.25 + 2 * len(one) + 1 for one in ANSWERS]
    assert found.notes == []


def test_parts_that_add_up_to_one_are_one(rollouts: list[Rollout]) -> None:
    a, r = rollouts[0].winner or "", rollouts[0].id
    parts = [Reward(a, r, f"{value}", value, key=f"{value}") for value in (0.7, 0.2, 0.1)]
    assert sum(one.value for one in parts) < rollout_reward(rollouts[0], parts) == 1


def test_scorers_have_one_event_loop(score: Score) -> None:
    """Connections of a module's async client belong to the loop that made them."""
    loops: list[Any] = []

    async def asks(trace: Trace) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    score(asks)
    score(asks, again=True)
    assert len(loops) == 8
    assert len({*map(id, loops)}) == 1


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """The parent's runs in a thread that the child does not have."""
    _event_loop()
    if (child := os.fork()) == 0:
        done = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 7), _event_loop())
        os._exit(done.result(20))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_none_is_no_reward_and_not_zero(score: Score) -> None:
    def some(trace: Trace) -> float | None:
        return None if trace.answer == "one" else 2.0

    found = score(some)
    assert found.rewards == [{}, {"some": 2}, {"some": 2}, {"some": 2}]
    assert found.totals[0] == 0.25  # the agent's own counts
    assert found.notes == []


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: (_ for _ in ()).throw(SystemExit("enough")), "SystemExit: enough"),
        (lambda: "1", "it returned '1', and a reward is a number"),
        (lambda: float("nan"), "it returned nan"),
        (lambda: {"a": 1.0, "b": 1e10}, "it returned 10000000000.0"),
        (lambda: [1.0], "TypeError"),
    ],
)
def test_a_failure_leaves_the_rollout_untrained_and_is_told_once(
    score: Score, result: Callable[[], Any], said: str
) -> None:
    def judge(trace: Trace) -> Any:
        return result() if trace.answer in ("one", "three") else 1.0

    found = score(judge, size)
    assert found.totals[:2] == [None, None]  # the other rewards alone are not what was earned
    assert found.totals[2] == 0.25 + 1 + len("eleven")
    [note] = found.notes
    assert note.startswith("rewards: judge gave 2 rollouts no reward: ")
    assert said in note


@pytest.mark.parametrize("raised", [KeyboardInterrupt, StopIteration, asyncio.CancelledError])
def test_whatever_a_function_raises_the_others_are_scored(
    score: Score, raised: type[BaseException]
) -> None:
    def now(trace: Trace) -> float:
        raise raised

    async def later(trace: Trace) -> float:
        canceled = asyncio.ensure_future(asyncio.sleep(10))
        canceled.cancel()
        await canceled
        return 1.0

    found = score(now, later, size)
    assert found.totals == [None] * 4
    assert [sorted(one) for one in found.rewards] == [["later", "now", "size"]] * 4
    assert len(found.notes) == 2


def test_a_function_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    script = (
        "import threading; from agentrl.scoring.scorer import _on_thread\n"
        "_on_thread(lambda given: threading.Event().wait(), None)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)


def test_a_group_is_compared_as_a_whole(score: Score) -> None:
    @group_reward
    async def rank(traces: list[Trace]) -> list[float | None]:
        return [float(at) if at else None for at, _ in enumerate(traces)]

    assert score(rank).rewards == [{}, {"rank": 1}, {"rank": 2}, {"rank": 3}]


def test_a_group_with_too_few_results_has_none(score: Score) -> None:
    @group_reward
    def rank(traces: list[Trace]) -> list[float]:
        return [1.0]

    found = score(rank)
    assert found.totals == [None] * 4
    assert "1 results for 4 rollouts" in found.notes[0]


def test_what_was_scored_is_not_scored_again_but_failures_are(score: Score) -> None:
    seen: list[str] = []
    fails = True

    def judge(trace: Trace) -> float:
        seen.append(trace.answer)
        if fails and trace.answer == "three":
            raise OSError("the judge is down")
        return 1.0

    score(judge)
    fails = False
    found = score(judge)
    assert sorted(seen) == sorted([*ANSWERS, "three"])
    assert found.rewards == [{"judge": 1}] * 4
    # Unless that is asked for.
    assert score(judge, again=True).rewards == [{"judge": 1}] * 4
    assert len(seen) == 9
    fails = True  # what was given stays
    found = score(judge, again=True)
    assert (found.rewards, len(found.notes)) == ([{"judge": 1}] * 4, 1)


def test_slow_functions_run_at_the_same_time(score: Score) -> None:
    together = threading.Barrier(4, timeout=20)

    def slow(trace: Trace) -> float:
        together.wait()  # all four must be here
        return 1.0

    assert score(slow).rewards == [{"slow": 1}] * 4


def test_what_computes_here_waits_until_the_trainer_does(
    store: Store, rollouts: list[Rollout], tmp_path: Path
) -> None:
    """Until then the sampler computes, or the trainer."""
    called: list[str] = []
    others = threading.Event()

    class Model:
        compares_group = takes_cores = True

        def __call__(self, traces: list[Trace]) -> list[float]:
            called.append("model")
            return [1.0] * len(traces)

    def judge(trace: Trace) -> float:
        called.append("judge")
        others.set()
        return 0.5

    functions = [RewardFunction("model", Model()), RewardFunction("judge", judge)]
    context = ScoringContext(store, rollouts[0].run_id, tmp_path, print)
    scorer = Scorer(functions, context)
    for at in range(2):
        group = [one.id for one in rollouts[2 * at :][:2]]
        scorer.begin(group)
        assert others.wait(60)
        assert called.count("model") == at
        scorer.finish([group], lambda done, of: None)
        assert called.count("model") == at + 1
        others.clear()
    scorer.close()
    assert Scored(store, rollouts, []).rewards == [{"model": 1.0, "judge": 0.5}] * 4


def test_a_function_is_told_where_it_is_before_it_scores(
    store: Store, rollouts: list[Rollout], score: Score
) -> None:
    class Judge:
        __name__ = "judge"
        context: ScoringContext

        def connect(self, context: ScoringContext) -> None:
            self.context = context

        def __call__(self, trace: Trace) -> float:
            return float(self.context.run_id == rollouts[0].run_id)

    assert score(Judge()).rewards == [{"judge": 1}] * 4


def test_what_a_policy_rewarded_is_left_to_it(store: Store, tmp_path: Path) -> None:
    run_id = start_run(store, 1, Policies(on_error=-1.0))
    store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR, error="it raised")
    context = ScoringContext(store, run_id, tmp_path, print)
    scorer = Scorer([RewardFunction("size", size)], context)
    scorer.score(store.rollouts(run_id), lambda done, total: None)
    [rollout] = store.rollouts(run_id)
    assert rollout_reward(rollout, store.rewards([rollout.id])) == -1.0
