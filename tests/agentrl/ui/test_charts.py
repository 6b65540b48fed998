from __future__ import annotations

import json

from agentrl.ui.charts import bars, chart, lines, with_spread
from agentrl.ui.run_charts import books, metric_names, run_charts
from agentrl.ui.views import _templates
from agentrl_tracer.schemas import Accounting


def _rendered(one: object) -> str:
    source = '{% from "charts.html" import chart %}{{ chart(one) }}'
    return _templates.from_string(source).render(one=one)


def test_several_curves_stand_in_one_table_by_x() -> None:
    curves = with_spread("a", {0: 0.5, 2: 1.0}, {0: (0.25, 0.75), 1: (0.0, 1.0)})
    curves |= {"b": {2: float("nan"), 3: 0.0}, "empty": {2: None}}
    one = lines("r", "Rate", curves, unit="%", href="/at?x={x}")
    assert one["columns"] == ["step", "a", "a, low", "a, high", "b"]
    assert one["rows"] == [
        [0, 0.5, 0.25, 0.75, None], [2, 1.0, None, None, None], [3, None, None, None, 0.0],
    ]  # fmt: skip
    text = _rendered(one)
    drawn = text.split('application/json">')[1].split("</script>")[0]
    assert json.loads(drawn)["rows"] == one["rows"]
    assert '<tr><td><a href="/at?x=0">0</a></td><td>50 %</td><td>25 %</td><td>75 %</td>' in text


def test_hostile_names_end_neither_the_script_nor_the_table() -> None:
    name = "</script><script>alert(1)</script>"
    for one in (
        lines("a", name, {name: {1: 1.0}}, href='/x?"onclick={x}'),
        bars("b", name, {name: {name: 1.0}}),
        chart("flow", "c", name, [name], [[name, {"text": name, "href": '/x?"onclick=1'}, 1]]),
    ):
        text = _rendered(one)
        assert "<script>" not in text
        assert text.count("</script>") == 1
        assert 'href="/x?"' not in text


def test_each_of_several_adapters_has_its_own_curves() -> None:
    row = {
        "reward/mean": 0.5, "a/reward/mean": 0.4, "a/loss": 1.0, "b/loss": 2.0,
        "a/clip_fraction": 0, "staleness/mean": 0,
    }  # fmt: skip
    shares = {"rollouts": 0.75, "update": 0.25}
    found = run_charts("/runs/r", {1: row}, {}, [], ["a", "b"], shares, {"update": 0.9})
    columns = {one["id"]: one["columns"] for one in found}
    assert columns["loss"] == ["step", "a/loss", "b/loss"]
    assert columns["reward"] == ["step", "mean", "a"]
    assert {"clip", "phases", "cores"} <= columns.keys()
    assert "staleness" not in columns  # it is always zero
    assert row.keys() <= metric_names(["a", "b"])
    assert "a/alert/truncation" in metric_names(["a", "b"])


def test_books_that_do_not_add_up_show_what_is_missing() -> None:
    rows = books("/runs/r", Accounting(10, 8, 5, {"too_long": 1}, 2))["rows"]
    assert rows[:2] == [["proxied", "recorded", 8], ["proxied", "not recorded", 2]]
    ends = {to["text"]: (to["href"], amount) for _, to, amount in rows[2:]}
    assert ends == {
        end: (f"/runs/r/calls?verdict={end}", amount)
        for end, amount in (("trained", 5), ("too_long", 1), ("pending", 2))
    }
