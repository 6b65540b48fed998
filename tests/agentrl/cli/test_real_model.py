"""smollm2-135m from training to export: `make real-model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import agentrl

from agentrl.runs.metric_names import DIFFERENCE

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]


def output(*arguments: object) -> str:
    done = agentrl(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_trains_resumes_and_answers_from_a_merged_folder(smollm2: str, tmp_path: Path) -> None:
    small = ["--batch-size", 2, "--group-size", 4, "--max-tokens", 16, "--steps", 2]
    where = ["--runs", tmp_path / "runs", "--name", "real"]
    output("train", "--config", "examples/hello/real.toml", *where, *small, "--evaluation.every", 9)
    run = tmp_path / "runs/real"
    output("train", "--resume", run, "--steps", "3")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["calls"]["adds_up"]
    assert summary["calls"]["trained"] > 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(row.get(DIFFERENCE, 0) for row in rows) < 2e-4
    output("export", run, tmp_path / "merged", "--merged")
    task = ["--task", '{"n": 7}', "--runs", tmp_path / "runs"]
    trace = output("run", "examples/hello/agent.py:agent", *task, "--model", tmp_path / "merged")
    assert "Say you are 7" in trace
