"""Rollouts as ATIF trajectories, checked by Harbor's own model where its program is given."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from agentrl.history.atif import atif_records
from agentrl.history.export import rollout_records
from agentrl.history.sources import OpenRun

HARBOR = os.environ.get("AGENTRL_TEST_HARBOR")
CHECK = """
import sys
from harbor.models.trajectories import Trajectory
for line in sys.stdin:
    Trajectory.model_validate_json(line)
    print("valid")
"""


def test_a_step_of_the_agent_has_the_tokens_and_log_probs_of_its_call(run: OpenRun) -> None:
    records = {one["id"]: one for one in rollout_records(run, "step == 4")}
    found = list(atif_records(run, "step == 4"))
    assert len(found) == len(records) == 14
    for trajectory in found:
        record = records[trajectory["session_id"]]
        assert [step["step_id"] for step in trajectory["steps"]] == [
            at + 1 for at in range(len(trajectory["steps"]))
        ]
        calls = {call["id"]: call for call in record["calls"]}
        steps = [step for step in trajectory["steps"] if step["source"] == "agent"]
        assert {step["extra"]["call"] for step in steps} == calls.keys()
        for step in steps:
            call, metrics = calls[step["extra"]["call"]], step["metrics"]
            assert metrics["prompt_token_ids"] == call["prompt_ids"]
            assert metrics["completion_token_ids"] == call["response_ids"]
            assert metrics["logprobs"] == call["response_logprobs"]
        assert trajectory["extra"]["rewards"] == record["rewards"]


def test_results_of_tools_are_observations_of_the_step_that_called(run: OpenRun) -> None:
    trajectory = next(atif_records(run, "step == 4"))
    [step] = [one for one in trajectory["steps"] if "observation" in one]
    [tool], [result] = step["tool_calls"], step["observation"]["results"]
    assert isinstance(tool["arguments"], dict)
    assert result["source_call_id"] == tool["tool_call_id"]
    assert "tool" not in {one["source"] for one in trajectory["steps"]}


@pytest.mark.harbor
@pytest.mark.skipif(HARBOR is None, reason="AGENTRL_TEST_HARBOR is not Harbor's program")
def test_harbor_takes_the_trajectories(run: OpenRun) -> None:
    lines = [json.dumps(one) for one in atif_records(run, "")]
    python = str(Path(HARBOR or "").with_name("python"))
    said = subprocess.run(
        [python, "-c", CHECK], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert said.stdout.split() == ["valid"] * len(lines) != [], said.stderr
