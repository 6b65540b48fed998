"""Each example in a short form: its agent runs in training, and what it did is in the books."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from example import ROOT, Example

from agentrl_tracer.schemas import Purpose

SHORT: dict[str, Any] = {"steps": 1, "batch_size": 2, "group_size": 4, "runners": 2}


def short(name: str, folder: Path) -> Example:
    """One step on the first tasks, and one held-out task."""
    held_out = folder / "held_out.jsonl"
    first = (ROOT / "examples" / name / "held_out.jsonl").read_text().splitlines()[0]
    held_out.write_text(first + "\n")
    return Example(name, folder, SHORT | {"eval_tasks": held_out})


def check(example: Example, output: str) -> None:
    [row] = [row for row in example.folder.read_metrics() if "reward/mean" in row]
    assert row["reward/missing"] == 0, output  # every rollout ended, and with a reward
    assert 0 <= row["reward/mean"] <= 1
    assert row["sampler_trainer/max_logprob_difference"] < 1e-4
    accounting = example.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0


@pytest.mark.parametrize(
    ("name", "modules", "tools"),
    [
        ("langgraph_tools", ["langchain", "langchain_openai"], {"calculator", "lookup"}),
        ("openai_agents", ["agents"], {"set_timer", "send_message"}),
    ],
)
def test_frameworks(name: str, modules: list[str], tools: set[str], tmp_path: Path) -> None:
    for module in modules:
        pytest.importorskip(module)
    example = short(name, tmp_path)
    check(example, example.train())
    requests = [call.request or {} for call in example.calls()]
    tools_of = [tool.get("function", tool) for one in requests for tool in one.get("tools", [])]
    assert {tool["name"] for tool in tools_of} == tools
    if name == "langgraph_tools":  # the graph ran tools, and the model saw what they said
        assert any(message["role"] == "tool" for one in requests for message in one["messages"])


@pytest.fixture(scope="module")
def node_modules() -> None:
    """Installs the example's one package, where there is Node and a registry."""
    folder = ROOT / "examples" / "node_agent"
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("there is no Node here")
    if not (folder / "node_modules" / "openai").exists():
        npm = ["npm", "ci", "--no-audit", "--no-fund"]
        done = subprocess.run(npm, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install openai here: {done.stderr[-300:]}")


@pytest.mark.usefixtures("node_modules")
def test_node_agent(tmp_path: Path) -> None:
    example = short("node_agent", tmp_path)
    check(example, example.train())
    calls = example.calls()
    assert len(calls) == 8
    lines = (ROOT / "examples/node_agent/train.jsonl").read_text().splitlines()
    names = {json.loads(line)["name"] for line in lines}
    for call in calls:
        [message] = (call.request or {})["messages"]
        assert message["content"].split()[1].rstrip(".") in names


def test_two_agents(tmp_path: Path) -> None:
    """Two adapters over one base, trained together on the calls of their agents."""
    both = ("messenger", "impostor")
    example = short("two_agents", tmp_path)
    check(example, example.train())
    calls = example.calls()
    assert {(call.model, call.adapter) for call in calls} == {(name, name) for name in both}
    assert {call.adapter for call in calls if call.trained_step == 1} == set(both)
    [row] = [row for row in example.folder.read_metrics() if "reward/mean" in row]
    assert row["calls/trained"] == sum(row[f"{name}/calls/trained"] for name in both)
    for name in both:
        assert row[f"{name}/grad_norm"] > 0
        assert row[f"{name}/reward/mean"] == row["reward/mean"]  # one reward for both
    files = [example.folder.adapter / name / "adapter_model.safetensors" for name in both]
    assert len({file.read_bytes() for file in files}) == 2
    output = example.agentrl(
        "eval", "examples/two_agents/agent.py:agent",
        "--tasks", str(example.settings["eval_tasks"]), "--runners", "1",
        "--adapter-path", str(example.folder.adapter), "--runs", str(tmp_path),
    )  # fmt: skip
    evaluated = Example("two_agents", tmp_path, run=next(tmp_path.glob("eval-*")).name)
    assert [call.adapter for call in evaluated.calls(Purpose.EVAL)] == list(both), output
