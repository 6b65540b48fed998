"""Judges that give numbers, over a real gateway and a provider that plays the judge."""

from __future__ import annotations

import json
from typing import Any

import pytest
from judging import Bench, judged, scoring
from provider_servers import said

from agentrl.config.errors import ConfigError
from agentrl.judge import Relative, Rubric
from agentrl_tracer.schemas import SkipReason

POINTS = {"red": 0.9, "green": 0.5, "blue": 0.2, "none": 0.0}
COST = 3 * 0.01 + 2 * 0.1  # of each of the provider's answers: 3 tokens read, 2 written


def metrics(judge: Any) -> dict[str, float]:
    """What the judge counted, by the end of its names, without zeros."""
    return {name.rpartition("/")[2]: value for name, value in judge.take_metrics().items() if value}


def test_each_member_gets_its_own_score_back_from_a_shuffled_request(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    judge = bench.connect(Relative("judge", "Redder is better."))
    traces = bench.group("none", "red", "blue", "green", "red")
    assert judged(judge, traces) == [0.0, 0.9, 0.2, 0.5, 0.9]
    [data] = bench.server.seen
    shown = [messages[-1]["content"] for messages in data["conversations"].values()]
    assert sorted(shown) == ["blue", "green", "none", "red"]  # equal ones once
    assert shown != ["none", "red", "blue", "green"]
    assert data["shared"] == [{"role": "user", "content": "Name a color."}]
    assert all(len(messages) == 1 for messages in data["conversations"].values())
    body = bench.server.bodies[0]
    assert "Redder is better." in body["messages"][0]["content"]
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["1", "2", "3", "4"]


def test_judgments_are_recorded_balance_and_train_nothing(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    judge = bench.connect(Relative("judge"))
    traces = bench.group("red", "blue")
    judged(judge, traces)
    for trace, color in zip(traces, ("red", "blue"), strict=True):
        [note] = bench.noted(trace, judge)
        assert (note["score"], note["why"]) == (POINTS[color], f"it says {color}")
        assert note["cost"] == pytest.approx(COST)
        call = bench.gateway.store.call(note["calls"][0])
        assert call is not None
        assert (call.run_id, call.rollout_id) == (bench.gateway.run_id, None)
        assert call.skip_reason is SkipReason.NO_ROLLOUT
        assert (call.agent, call.params["request_id"]) == ("judge.relative_judge", trace.group_id)
        assert "red" in json.dumps(call.request)
    assert bench.gateway.store.verify(bench.gateway.run_id).fault is None
    assert metrics(judge) == {"calls": 1, "cost": pytest.approx(COST)}


def test_the_same_conversations_are_not_judged_again(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    judge = bench.connect(Relative("judge", max_calls=2))
    first = judged(judge, bench.group("red", "blue"))
    # Of another group, in another order; then by a process that resumes.
    assert judged(judge, bench.group("blue", "red")) == first[::-1]
    resumed = bench.connect(Relative("judge", max_calls=2))
    assert judged(resumed, bench.group("red", "blue")) == first
    assert len(bench.server.seen) == 1
    assert metrics(resumed) == {"cached": 1}
    # The budget is the run's.
    assert judged(resumed, bench.group("green", "blue")) == [0.5, 0.2]
    assert judged(resumed, bench.group("green", "red")) == [None, None]
    assert metrics(resumed)["over_budget"] == 1


def test_an_answer_that_was_cut_off_is_asked_for_again(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    (bench.folder / "judgments.jsonl").write_text('{"key": "cut o\n')
    for _ in range(2):  # processes
        judge = bench.connect(Relative("judge"))
        assert judged(judge, bench.group("red", "blue")) == [0.9, 0.2]
    assert metrics(judge) == {"cached": 1}


def test_tool_calls_of_other_ids_are_the_same_conversation(bench: Bench) -> None:
    def using(call_id: str) -> list[dict[str, Any]]:
        function = {"name": "look", "arguments": '{"at": 1}'}
        return [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": "red"},
        ]  # fmt: skip

    bench.server.says = lambda data: {"1": {"explanation": "", "score": 1}}
    judge = bench.connect(Relative("judge"))
    traces = bench.group("", "")
    for trace, call_id in zip(traces, ("call_a", "call_b"), strict=True):
        trace.messages[:] = using(call_id)
    assert judged(judge, traces) == [1.0, 1.0]
    [data] = bench.server.seen
    assert data["conversations"]["1"][1]["tool_calls"] == [
        {"name": "look", "arguments": '{"at": 1}'}
    ]


def test_broken_json_is_asked_for_once_more(bench: Bench) -> None:
    answers = iter(["no json", {"1": {"explanation": "", "score": 0.5}}])
    bench.server.says = lambda data: next(answers)
    judge = bench.connect(Relative("judge"))
    [trace] = bench.group("red")
    assert judged(judge, [trace]) == [0.5]
    assert metrics(judge) == {"calls": 2, "broken": 1, "cost": pytest.approx(2 * COST)}
    assert len(bench.noted(trace, judge)[0]["calls"]) == 2
    assert "no JSON" in bench.server.bodies[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    "answer",
    ["no", "[]", {}, {"1": {"score": "high"}}, {"1": {"score": True}}, '{"1": {"score": NaN}}'],
)
def test_twice_broken_gives_no_reward(bench: Bench, answer: Any) -> None:
    bench.server.says = lambda data: answer
    judge = bench.connect(Relative("judge"))
    [trace] = bench.group("red")
    assert judged(judge, [trace]) == [None]
    counted = metrics(judge)
    assert (counted["broken"], counted["unscored"]) == (2, 1)
    assert bench.noted(trace, judge)[0]["why"].startswith("broken: ")
    assert len(bench.notes) == 1


def test_scores_out_of_range_are_clipped(bench: Bench) -> None:
    bench.server.says = scoring({"red": 7, "green": 1.0, "blue": -0.5})
    judge = bench.connect(Relative("judge"))
    assert judged(judge, bench.group("red", "green", "blue")) == [1.0, 1.0, 0.0]
    counted = metrics(judge)
    assert counted["clipped"] == 2


@pytest.mark.parametrize(
    ("message", "ended"),
    [({"content": None, "refusal": "I will not."}, "stop"), ({"content": ""}, "content_filter")],
)
def test_a_refusal_is_not_asked_again(bench: Bench, message: Any, ended: str) -> None:
    choice = {"index": 0, "finish_reason": ended, "message": {"role": "assistant", **message}}
    bench.server.says = lambda data: {**said(""), "choices": [choice]}
    judge = bench.connect(Relative("judge"))
    assert judged(judge, bench.group("red", "blue")) == [None, None]
    counted = metrics(judge)
    assert (counted["calls"], counted["refused"], counted["unscored"]) == (1, 1, 2)


@pytest.mark.parametrize("model", ["judge", "away"])
def test_a_judge_that_is_down_is_noted_once(bench: Bench, model: str) -> None:
    bench.server.says = lambda data: 500
    judge = bench.connect(Relative(model))
    for answers in (("red", "blue"), ("red", "green")):
        assert judged(judge, bench.group(*answers)) == [None, None]
    assert metrics(judge)["down"] == 2
    [note] = bench.notes
    assert note.startswith(f"judge relative_{model}: no answer: ")
    # It is not remembered as down.
    if model == "judge":
        bench.server.says = scoring(POINTS)
        assert judged(judge, bench.group("red", "blue")) == [0.9, 0.2]


def test_dollars_are_a_budget_and_unknown_prices_are_told(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    judge = bench.connect(Relative("judge", max_cost=1.5 * COST))
    groups = [("red", "blue"), ("red", "green"), ("blue", "green")]
    scores = [judged(judge, bench.group(*answers)) for answers in groups]
    assert [one[0] is None for one in scores] == [False, False, True]
    assert "max_cost" in bench.notes[0]
    judged(bench.connect(Relative("other", max_cost=1)), bench.group("red", "blue"))
    assert "no price of 'other'" in bench.notes[1]


def test_one_that_asked_no_model_has_no_score(bench: Bench) -> None:
    bench.server.says = scoring(POINTS)
    judge = bench.connect(Relative("judge"))
    traces = bench.group("red", "blue")
    traces[0].messages.clear()
    assert judged(judge, traces) == [None, 0.2]
    assert bench.noted(traces[0], judge)[0]["why"] == "it asked no model"


def test_a_rubric_weighs_the_scores_of_each_member_alone(bench: Bench) -> None:
    def say(data: Any) -> Any:
        assert data["criteria"] == {"1": "It is a color.", "2": "It is polite.", "3": "It is long."}
        red = data["conversation"][-1]["content"] == "red"
        return {
            at: {"explanation": at, "score": s}
            for at, s in zip("123", (1, float(red), 0.5), strict=True)
        }

    bench.server.says = say
    weights = {"It is a color.": 2.0, "It is polite.": 1.0, "It is long.": -1.0}
    judge = bench.connect(Rubric("judge", weights))
    traces = bench.group("red", "blue", "red")
    assert judged(judge, traces) == pytest.approx([2.5 / 3, 1.5 / 3, 2.5 / 3])
    assert len(bench.server.seen) == 2
    [note] = bench.noted(traces[0], judge)
    assert note["criteria"]["It is long."] == {"score": 0.5, "why": "3"}


def test_models_and_settings_that_cannot_be_are_refused_by_name(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"got model 'gpt-5', which is none of .*judge.*policy"):
        bench.connect(Relative("gpt-5"))
    with pytest.raises(ConfigError, match="no weight is above 0"):
        Rubric("judge", {"It is rude.": -1.0})
