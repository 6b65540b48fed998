from __future__ import annotations

import json

from agentrl.ui.charts import bars, curve, flow, lines, timeline
from agentrl.ui.run_charts import books, metric_names, run_charts
from agentrl.ui.views import _templates
from agentrl_tracer.schemas import Accounting


def _rendered(chart: object) -> str:
    source = '{% from "charts.html" import chart %}{{ chart(one) }}'
    return _templates.from_string(source).render(one=chart)


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    one = curve("reward", {step: step / 10 for step in range(1, 2001)})
    assert 300 < len(one["points"]) <= 400
    assert one["points"][-1] == [2000, 200.0]
    assert len(lines("r", "Reward", [one])["table"]["rows"]) == len(one["points"])


def test_figures_of_several_curves_stand_in_one_table_by_x() -> None:
    series = [
        curve("a", {0: 0.5, 2: 1.0}, {0: (0.25, 0.75)}),
        curve("b", {2: None, 3: 0.0}),
        curve("empty", {2: None}),
    ]
    table = lines("r", "Rate", series, unit="%", href="/at?x={x}")["table"]
    assert table["head"] == ["step", "a", "b"]
    assert table["rows"] == [
        [{"text": "0", "href": "/at?x=0"}, "50 % (25 % to 75 %)", None],
        [{"text": "2", "href": "/at?x=2"}, "100 %", "–"],
        [{"text": "3", "href": "/at?x=3"}, None, "0 %"],
    ]


def test_what_is_not_finite_is_a_gap_in_valid_json() -> None:
    chart = lines("r", "R", [curve("a", {1: float("nan"), 2: 1.0})])
    text = _rendered(chart)
    data = text.split('application/json">')[1].split("</script>")[0]
    assert json.loads(data)["series"][0]["points"] == [[1, None], [2, 1.0]]


def test_hostile_names_end_neither_the_script_nor_the_table() -> None:
    name = "</script><script>alert(1)</script>"
    for chart in (
        lines("a", name, [curve(name, {1: 1.0})]),
        bars("b", name, [name], [{"name": name, "values": [1.0]}], hrefs=['/x?"onclick=1']),
        flow("c", name, [(name, "end", 1)], {"end": "/x"}),
        timeline("d", name, [name], [(name, 0.0, 1.0, name)]),
    ):
        text = _rendered(chart)
        assert "<script>" not in text
        assert text.count("</script>") == 1
        assert 'href="/x?"' not in text


def test_a_flow_leaves_out_what_is_empty_and_lists_it() -> None:
    chart = flow("b", "Books", [("a", "b", 3), ("a", "c", 0)], {"b": "/b"}, "calls")
    assert [link["target"] for link in chart["drawn"]["links"]] == ["b"]
    assert chart["table"]["rows"] == [["a", {"text": "b", "href": "/b"}, 3], ["a", "c", 0]]


def test_each_of_several_adapters_has_its_own_curves() -> None:
    row = {
        "reward/mean": 0.5,
        "a/reward/mean": 0.4,
        "a/loss": 1.0,
        "b/loss": 2.0,
        "a/clip_fraction": 0,
    }
    charts = {
        one["id"]: one["drawn"]["series"] for one in run_charts("r", {1: row}, {}, [], ["a", "b"])
    }
    assert [one["name"] for one in charts["loss"]] == ["a/loss", "b/loss"]
    assert [one["name"] for one in charts["reward"]][1:] == ["a/reward/mean"]
    assert row.keys() <= metric_names(["a", "b"])
    assert "a/alert/truncation" in metric_names(["a", "b"])


def test_books_that_do_not_add_up_show_what_is_missing() -> None:
    links = books("r", Accounting(10, 8, 5, {"too_long": 1}, 2))["drawn"]["links"]
    flows = {(one["source"], one["target"]): one["value"] for one in links}
    assert flows == {
        ("proxied", "recorded"): 8, ("proxied", "not recorded"): 2, ("recorded", "trained"): 5,
        ("recorded", "too_long"): 1, ("recorded", "pending"): 2,
    }  # fmt: skip
