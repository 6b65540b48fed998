"""Verdicts, accounting, and identical requests."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_gateway import until
from store_records import call_of, claimed, record_spans, start_run, waits_for_a_lock

from agentrl_tracer.schemas import (
    AttemptState,
    CallState,
    Claim,
    NewRollout,
    PromptKinds,
    Purpose,
    Reward,
    SkipReason,
)
from agentrl_tracer.store import Store, tables
from agentrl_tracer.store.writer import TraceWriter

ODD = {"messages": [{"role": "user", "content": "grüße \0 \U0001f44d \\u0000"}], "seed": 2**70}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_call_that_is_judged_while_its_late_end_is_written_counts_once(
    store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_calls("boot", [call_of(claim, "a", state=CallState.OPEN)], [], 1)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    judging, count = threading.Event(), store.count_verdicts

    def pause(*arguments: Any) -> None:
        judging.set()
        until(partial(waits_for_a_lock, store))
        count(*arguments)

    monkeypatch.setattr(store, "count_verdicts", pause)
    verdicts = {"trained": {}, "skipped": {"a": SkipReason.EVALUATION}}
    work = threading.Thread(target=partial(store.settle, **verdicts))
    work.start()
    assert judging.wait(10)
    with closing(Store(store.url)) as gateways:
        gateways.write_calls("boot", [], [call_of(claim, "a")], 1)
    work.join()
    seen = store.verify(claim.run_id)
    assert (seen.fault, seen.kept.recorded) == (None, 1)


async def test_the_sum_notices_a_lost_record(store: Store, claim: Claim) -> None:
    writer = TraceWriter(store, "boot")
    for name in ("a", "b"):
        writer.open(call_of(claim, name, state=CallState.OPEN))
        await writer.finish(call_of(claim, name))
    writer.close()
    store.settle(trained={"a": 1}, skipped={"b": SkipReason.ZERO_ADVANTAGE})
    assert store.verify(claim.run_id).fault is None
    with store.db.write() as c:  # break it on purpose
        c.execute(tables.calls.update().values(trained_step=1, skip_reason=None))
    assert "the kept sums are" in (store.verify(claim.run_id).fault or "")
    with store.db.write() as c:
        c.execute(tables.calls.delete().where(tables.calls.c.id == "b"))
    assert "2 calls, and the store holds 1" in (store.verify(claim.run_id).fault or "")


def test_continuity_is_counted_for_each_rollout(store: Store, claim: Claim) -> None:
    params_of_calls: list[Any] = [
        {"continued": False, "branched": "first_call"},
        {"continued": True},
        {"continued": True, "branched": "history_edited"},
        {"continued": True},
        {"n": 1},  # a provider model's
    ]
    calls = [call_of(claim, f"c{i}", params=params) for i, params in enumerate(params_of_calls)]
    store.write_calls("boot", [], calls, len(calls))
    expected = {"first_call": 1, "continued": 3, "history_edited": 1}
    kinds = [PromptKinds(Counter(expected), 1, claim.rollout_id)]
    assert store.continuity(claim.run_id) == kinds  # counted from its calls
    store.settle(trained={}, skipped={}, calls=store.calls(rollout_ids=[claim.rollout_id]))
    with store.db.write() as c:
        c.execute(tables.calls.delete())
    assert store.continuity(claim.run_id) == kinds  # kept
    assert store.continuity("another") == []


def test_a_verdict_stands(store: Store, claim: Claim) -> None:
    store.write_calls("boot", [], [call_of(claim, "x")], 1)
    store.settle(trained={}, skipped={"x": SkipReason.ZERO_ADVANTAGE})
    store.settle(trained={"x": 4}, skipped={})
    (call,) = store.calls(attempt_ids=[claim.attempt_id])
    assert (call.trained_step, call.skip_reason) == (None, SkipReason.ZERO_ADVANTAGE)


def test_a_resumed_run_counts_what_it_repeats_once(store: Store) -> None:
    run_id = start_run(store, rollouts=1)
    (task,) = store.add_tasks(run_id, "eval", [{"n": 8}])
    new = [NewRollout(task, f"e{step}", Purpose.EVAL, step, 0, seed=1) for step in (0, 1, 2)]
    store.enqueue(run_id, new)
    for name in ("train 1", "eval 0", "eval 1", "eval 2"):
        claim = claimed(store)
        store.write_calls("boot", [], [call_of(claim, name)], 1)
        store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
        if name.startswith("eval"):
            store.settle(trained={}, skipped={name: SkipReason.EVALUATION})
        else:
            store.settle(trained={name: 1}, skipped={})

    def standing() -> set[str]:
        calls = store.calls(rollout_ids=[r.id for r in store.rollouts(run_id)])
        return {call.id for call in calls if call.skip_reason != SkipReason.SUPERSEDED}

    assert store.supersede(run_id, after_step=2) == 0
    store.write_calls("boot", [], [call_of(claim, "under way")], 1)
    assert store.cancel(run_id, "resumed", after_step=1, evaluated=True) == 1
    assert store.supersede(run_id, after_step=1) == 2  # evaluation 2, and the call under way
    assert standing() == {"train 1", "eval 0", "eval 1"}
    assert store.cancel(run_id, "resumed", after_step=1, evaluated=False) == 2
    store.supersede(run_id, after_step=1)
    assert standing() == {"train 1", "eval 0"}
    assert store.outcomes(run_id, purpose=Purpose.EVAL).attempts == {"succeeded": 1}
    assert store.accounting(run_id).skipped == {SkipReason.EVALUATION: 1, SkipReason.SUPERSEDED: 3}
    store.supersede(run_id, after_step=0)  # what later steps trained on, too
    assert standing() == {"eval 0"}
    verified = store.verify(run_id)
    assert verified.kept == verified.counted


def test_verdicts_given_while_calls_are_written_are_counted_once(
    store: Store, claim: Claim
) -> None:
    judge = call_of(claim, "judge", skip_reason=SkipReason.NOT_TRAINABLE_MODEL)
    opened = replace(judge, id="open", state=CallState.OPEN)
    for _ in range(2):  # a commit whose answer was lost
        store.write_calls("boot", [opened], [judge], 2)
    store.write_calls("boot", [], [replace(opened, state=CallState.COMPLETED)], 2)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    for _ in range(2):
        store.write_calls("boot", [], [call_of(claim, "late"), judge], 3)
    store.settle(trained={}, skipped={"judge": SkipReason.EVALUATION, "late": SkipReason.STALE})
    assert store.verify(claim.run_id).fault is None
    assert store.accounting(claim.run_id).skipped == {
        SkipReason.NOT_TRAINABLE_MODEL: 2, SkipReason.LATE_CALL: 1,
    }  # fmt: skip


def test_more_ids_than_a_statement_has_parameters(store: Store, claim: Claim) -> None:
    store.write_calls("boot", [], [call_of(claim, "a")], 1)
    ids = [*(f"none-{i}" for i in range(70_000)), claim.rollout_id]
    assert [rollout.id for rollout in store.rollouts(claim.run_id, ids=ids)] == [claim.rollout_id]
    assert [call.id for call in store.calls(rollout_ids=ids, bodies=False)] == ["a"]
    assert [attempt.id for attempt in store.attempts(ids)] == [claim.attempt_id]
    assert store.rewards(ids) == []
    store.move_to_step(ids, 5)
    assert store.unfinished_ids(claim.run_id, Purpose.TRAIN, since_step=5) == {claim.rollout_id}
    assert store.unfinished_ids(claim.run_id, Purpose.TRAIN, since_step=6) == set()


@pytest.mark.parametrize("request_", [ODD, {"temperature": 1.0, "x": "\ud800"}, {}])
def test_same_requests_are_found_by_what_was_asked(store: Store, request_: Any) -> None:
    start_run(store, rollouts=2)
    first, other = claimed(store), claimed(store)
    backwards = dict(reversed([*request_.items(), ("n", 1)]))
    asked = [
        call_of(first, "a", seq=0, request=request_, prompt_ids=[1], response_ids=[7, 8, 0]),
        call_of(first, "b", seq=1, request=request_, prompt_ids=[1], response_ids=[7, 9, 0]),
        call_of(first, "c", seq=2, request=backwards, prompt_ids=[1, 7, 8, 5], response_ids=[6]),
        call_of(other, "d", seq=0, request=request_),
    ]
    store.write_calls("one", [], asked, 4)
    store.write_calls("one", [call_of(first, "e", seq=3, request=request_)], [], 1)
    found = store.same_requests(first.attempt_id, request_)
    assert [(past.call.id, past.continued) for past in found] == [
        ("a", True), ("b", False), ("e", False),
    ]  # fmt: skip
    assert found[0].call == replace(asked[0], request=found[0].call.request)
    assert [past.call.id for past in store.same_requests(first.attempt_id, backwards)] == ["c"]


def test_what_was_not_delivered_does_not_train_and_what_trained_stays(
    store: Store, claim: Claim
) -> None:
    answered = [call_of(claim, name, params={"request_id": name}) for name in ("a", "b", "c")]
    store.write_calls("boot", [], answered, 3)
    store.settle(trained={"a": 1}, skipped={})
    store.mark_undelivered(claim.attempt_id, ["a", "b", "unknown"])
    states = {call.id: call.state for call in store.calls(attempt_ids=[claim.attempt_id])}
    kept, lost = CallState.COMPLETED, CallState.CANCELLED
    assert states == {"a": kept, "b": lost, "c": kept}
    store.mark_delivered(claim.attempt_id, "b", "again")  # to a retry
    store.mark_undelivered(claim.attempt_id, ["b"])  # of its first request, late
    assert {call.state for call in store.calls(attempt_ids=[claim.attempt_id])} == {kept}


def test_a_reward_delivered_twice_counts_once(store: Store, claim: Claim) -> None:
    reward = Reward(claim.attempt_id, claim.rollout_id, "reward", 1.0, key="span-1")
    record_spans(store, [], [reward])
    record_spans(store, [], [reward, replace(reward, key="span-2", value=0.5)])
    assert [r.value for r in store.rewards([claim.rollout_id])] == [1.0, 0.5]


def test_the_longest_call_of_an_attempt_is_the_one_with_most_tokens_and_else_the_last(
    store: Store, claim: Claim
) -> None:
    judge = {"adapter": None, "prompt_ids": [], "response_ids": [], "response_logprobs": []}
    calls = [
        call_of(claim, "short", seq=0),
        call_of(claim, "long", seq=1, prompt_ids=[1, 2, 3, 4]),
        call_of(claim, "judge", seq=2, **judge),
    ]
    store.write_calls("boot", [], calls, 3)
    assert [call.id for call in store.longest_calls([claim.attempt_id, "none"])] == ["long"]
    assert store.longest_calls([]) == []
    run_id = start_run(store)
    other = claimed(store)
    assert other.run_id == run_id
    asked = [call_of(other, f"asked-{seq}", seq=seq, **judge) for seq in range(2)]
    store.write_calls("boot", [], asked, 5)
    assert [call.id for call in store.longest_calls([other.attempt_id])] == ["asked-1"]


def test_calls_of_a_verdict_are_read_page_by_page_newest_first(store: Store, claim: Claim) -> None:
    names = [f"c{at}" for at in range(9)]
    store.write_calls("boot", [], [call_of(claim, name) for name in names], 9)
    trained = {"c0": 1, "c1": 2, "c2": 1, "c3": 2}
    skipped = dict.fromkeys(["c4", "c5", "c6"], SkipReason.ZERO_ADVANTAGE)
    store.settle(trained=trained, skipped=skipped)

    def pages(verdict: str) -> list[list[str]]:
        found: list[list[str]] = []
        before = ""
        while calls := store.judged(claim.run_id, verdict, before, limit=2):
            found.append([call["id"] for call in calls])
            before = calls[-1]["place"]
        return found

    assert pages("trained") == [["c3", "c1"], ["c2", "c0"]]
    assert pages("zero_advantage") == [["c6", "c5"], ["c4"]]
    assert pages("pending") == [["c8", "c7"]]
    assert pages("too_long") == []
    [one] = store.judged(claim.run_id, "trained", limit=1)
    assert (one["prompt"], one["sampled"], one["trained_step"]) == (2, 1, 2)


def test_busy_runners_are_those_with_a_running_attempt(store: Store, claim: Claim) -> None:
    assert list(store.busy_runners(claim.run_id)) == ["runner"]
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    assert store.busy_runners(claim.run_id) == {}
