"""smollm2-135m from training to export: `make real-model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import agentrl

from agentrl.capacity import available_cores
from agentrl.runs.metric_names import DIFFERENCE

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]


def output(*arguments: object) -> str:
    done = agentrl(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_trains_resumes_and_answers_from_a_merged_folder(smollm2: str, tmp_path: Path) -> None:
    how = ["--model", "smollm2-135m", "--model.cores", 2, "--runs", tmp_path / "runs"]
    how += ["--batch-size", 2, "--group-size", 4, "--max-tokens", 16, "--runners", 1]
    how += ["--tasks", "examples/hello/train.jsonl"]
    train = ["train", "examples/hello/agent.py:agent", *how]
    output(*train, "--name", "whole", "--steps", 3)
    output(*train, "--name", "real", "--steps", 2)
    run = tmp_path / "runs/real"
    output("train", "--resume", run, "--steps", "3")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["calls"]["adds_up"]
    assert summary["calls"]["trained"] > 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(row.get(DIFFERENCE, 0) for row in rows) < 2e-4
    # To the last bit, with the threads that the checkpoint has.
    state = json.loads((run / "checkpoints/step-00000003/meta.json").read_text())
    assert state["meta"]["cores"] == min(2, available_cores())
    resumed, whole = (
        one / "adapter/adapter_model.safetensors" for one in (run, run.parent / "whole")
    )
    assert resumed.read_bytes() == whole.read_bytes()
    output("export", run, tmp_path / "merged", "--merged")
    task = ["--task", '{"n": 7}', "--runs", tmp_path / "runs"]
    trace = output("run", "examples/hello/agent.py:agent", *task, "--model", tmp_path / "merged")
    assert "Say you are 7" in trace
