"""``agentrl report``: one file that shows a run, and holds neither secrets nor links out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store_records import record_answer
from ui_pages import HOSTILE, Recorded, begun

from agentrl.cli.report import report_command
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.ui.report import run_report
from agentrl_tracer.schemas import Purpose


def test_the_file_opens_alone_in_a_browser_and_draws(
    browser, recorded: Recorded, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "copied")
    shutil.copytree(recorded.root / recorded.name, folder.root)
    config = folder.read_config()
    config["models"] = {"judge": {"params": {"extra_headers": {"x-key": "sk-very-secret"}}}}
    config["gateway"]["forward_otlp"] = "https://user:otlp-secret@elsewhere.invalid"
    folder.write_json(folder.config, config)
    report_command(folder.root)
    report = folder.root / "report.html"
    text = report.read_text()
    assert "secret" not in text.lower()
    assert "Compare with" not in text
    assert "those of step" not in text
    assert HOSTILE.splitlines()[0] not in text

    page, faults = browser.new_page(), []
    page.on("console", lambda said: faults.append(said.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url))
    page.goto(report.as_uri())
    assert [fault for fault in faults if not fault.startswith(("file:", "data:"))] == []
    assert page.evaluate("window.hacked") is None
    assert page.locator("figure.chart canvas").count() == page.locator("figure.chart").count() > 9
    assert page.locator("a[href^='/']").count() == 0
    assert page.locator("details >> text=I am 14.").count() >= 1
    page.close()


def test_without_evaluations_it_has_the_best_and_the_worst_rollout(tmp_path: Path) -> None:
    with begun(tmp_path, "own", "train") as (store, run_id):
        for step, said, reward in ((1, "old", 9.0), (2, "best", 1.0), (2, "worst", -1.0)):
            record_answer(store, run_id, Purpose.TRAIN, step, ("Who?", f"the {said}"), reward)
    text = run_report(tmp_path / "own")
    assert "the best" in text[text.index("Step 2, train task 0: reward +1") :]
    assert "the worst" in text[text.index("reward -1") :]
    assert "the old" not in text


def test_a_folder_that_is_not_there_is_named(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out: .* is no folder"):
        report_command(recorded.root / recorded.name, out=tmp_path / "missing" / "a.html")
