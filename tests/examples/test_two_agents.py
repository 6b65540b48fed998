"""Two adapters over one base, trained together: the example in a short form."""

from __future__ import annotations

import json

import pytest
from example import Example

from agentrl_tracer.schemas import Purpose

BOTH = ("messenger", "impostor")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder = tmp_path_factory.mktemp("two")
    held_out = folder / "held_out.jsonl"
    held_out.write_text(json.dumps({"n": 1000}) + "\n")
    settings = {
        "steps": 2, "batch_size": 4, "group_size": 4, "runners": 2, "eval_every": 100,
        "eval_tasks": held_out,
    }  # fmt: skip
    example = Example("two_agents", folder, settings)
    example.train()
    return example


def test_each_call_trains_the_adapter_that_its_agent_asked_for(trained: Example) -> None:
    calls = trained.calls()
    assert {(call.model, call.adapter) for call in calls} == {(name, name) for name in BOTH}
    assert len(calls) == 2 * 2 * 16
    for name in BOTH:
        own = [call for call in calls if call.adapter == name]
        assert any(call.trained_step == 1 for call in own)
        # Step 2 was sampled by what step 1 made of this adapter.
        assert {call.adapter_version for call in own if call.trained_step == 2} <= {1}
    accounting = trained.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0


def test_metrics_are_there_for_the_run_and_for_each_adapter(trained: Example) -> None:
    row = next(row for row in trained.folder.read_metrics() if row.get("calls/trained"))
    assert row["calls/trained"] == sum(row[f"{name}/calls/trained"] for name in BOTH)
    for name in BOTH:
        assert row[f"{name}/tokens/trained"] > 0
        assert row[f"{name}/grad_norm"] > 0
        assert row[f"{name}/reward/mean"] == row["reward/mean"]  # one reward for both
    assert row["sampler_trainer/max_logprob_difference"] < 1e-4


def test_both_adapters_are_saved_and_found_again(trained: Example) -> None:
    files = [trained.folder.adapter / name / "adapter_model.safetensors" for name in BOTH]
    assert len({file.read_bytes() for file in files}) == 2
    output = trained.agentrl(
        "eval", "examples/two_agents/agent.py:agent",
        "--tasks", str(trained.settings["eval_tasks"]), "--runners", "1",
        "--adapter-path", str(trained.folder.adapter), "--runs", str(trained.runs),
    )  # fmt: skip
    evaluated = Example("two_agents", trained.runs, run=next(trained.runs.glob("eval-*")).name)
    calls = evaluated.calls(Purpose.EVAL)
    assert [call.adapter for call in calls] == list(BOTH), output
