"""Tournaments and panels, over a real gateway and a provider that plays the judge."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from judging import Bench, judged, scoring

from agentrl.config.errors import ConfigError
from agentrl.judge import Pairwise, Panel, Relative, Rubric
from agentrl.judge.judges import _pairs

RANKS = {"red": 3, "green": 2, "blue": 1, "cyan": 1}


def better(data: Any) -> Any:
    """Prefer by ``RANKS``."""
    first, second = (RANKS[data["conversations"][at][-1]["content"]] for at in "12")
    said = "tie" if first == second else "1" if first > second else "2"
    return {"explanation": "", "better": said}


def test_a_tournament_of_all_pairs_gives_win_rates(bench: Bench) -> None:
    bench.server.says = better
    judge = bench.connect(Pairwise("judge"))
    traces = bench.group("cyan", "red", "green", "blue", "red")
    assert judged(judge, traces) == pytest.approx([0.5 / 3, 1, 2 / 3, 0.5 / 3, 1])
    assert len(bench.server.seen) == 6  # equal ones do not meet
    [note] = bench.noted(traces[0], judge)
    assert (note["why"], len(note["calls"])) == ("0.5 of 3", 3)


@pytest.mark.parametrize(
    ("count", "opponents"), [(8, 2), (8, 3), (5, 4), (2, 1), (3, 9), (1, None)]
)
def test_each_meets_as_many_others_as_it_should(count: int, opponents: int | None) -> None:
    pairs = _pairs(count, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    met = Counter(place for pair in pairs for place in pair)
    wanted = min(opponents or count, count - 1)
    assert all(wanted <= met[at] <= wanted + 1 for at in range(count))
    first = Counter(pair[0] for pair in pairs)
    assert all(abs(2 * first[at] - met[at]) <= 2 for at in range(count))


def test_comparisons_that_fail_do_not_count(bench: Bench) -> None:
    def say(data: Any) -> Any:
        colors = {data["conversations"][at][-1]["content"] for at in "12"}
        return 500 if "blue" in colors else better(data)

    bench.server.says = say
    judge = bench.connect(Pairwise("judge"))
    assert judged(judge, bench.group("red", "green", "blue")) == [1.0, 0.0, None]
    assert judge.take_metrics()["judge/pairwise_judge/down"] == 2


def test_equal_conversations_need_no_judge(bench: Bench) -> None:
    judge = bench.connect(Pairwise("judge"))
    assert judged(judge, bench.group("red", "red")) == [0.5, 0.5]
    assert not bench.server.seen


def test_a_panel_means_and_tells_how_far_its_judges_are_apart(bench: Bench) -> None:
    def say(data: Any) -> Any:
        if "criteria" in data:
            red = data["conversation"][-1]["content"] == "red"
            return {"1": {"explanation": "", "score": float(red)}}
        return scoring({"red": 0.5, "blue": 0.4})(data)

    bench.server.says = say
    judge = bench.connect(Panel(Relative("judge"), Rubric("other", {"It is red.": 1.0})))
    traces = bench.group("red", "blue")
    assert judged(judge, traces) == pytest.approx([0.75, 0.2])
    found = judge.take_metrics()
    assert found["judge/panel/disagreement"] == pytest.approx(0.45)
    assert found["judge/relative_judge/calls"] == 1
    assert found["judge/rubric_other/calls"] == 2
    [note] = bench.noted(traces[0], judge)
    assert note["judges"] == {"relative_judge": 0.5, "rubric_other": 1.0}
    assert note["spread"] == pytest.approx(0.5)


def test_a_panel_goes_on_without_a_judge_that_is_down(bench: Bench) -> None:
    bench.server.says = scoring({"red": 0.5, "blue": 0.4})
    judge = bench.connect(Panel(Relative("judge"), Relative("away")))
    assert judged(judge, bench.group("red", "blue")) == [0.5, 0.4]
    assert judge.take_metrics()["judge/panel/absent"] == 1


def test_a_member_that_one_judge_did_not_score_has_no_mean(bench: Bench) -> None:
    def say(data: Any) -> Any:
        if "criteria" in data:
            red = data["conversation"][-1]["content"] == "red"
            return {"1": {"explanation": "", "score": 1}} if red else "broken"
        return scoring({"red": 0.5, "blue": 0.4})(data)

    bench.server.says = say
    judge = bench.connect(Panel(Relative("judge"), Rubric("other", {"It is red.": 1.0})))
    assert judged(judge, bench.group("red", "blue")) == [0.75, None]


def test_a_panel_needs_judges_of_different_names() -> None:
    with pytest.raises(ConfigError, match="different names"):
        Panel(Relative("judge"), Relative("judge"))
    Panel(Relative("judge"), Relative("judge", "Shorter is better.", name="short"))
