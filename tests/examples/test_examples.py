"""Each example in a short form: its agent runs in training, and what it did is in the books."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import agentrl
from settings import flags

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Call, Purpose
from agentrl_tracer.store import Store

ROOT = Path(__file__).parents[2]
SHORT: dict[str, Any] = {"steps": 1, "batch_size": 2, "group_size": 4, "runners": 2}


def command(*arguments: object) -> str:
    done = agentrl(*arguments, cwd=ROOT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def trained(name: str, runs: Path) -> tuple[RunFolder, dict[str, Any]]:
    """Train one step on an example's first tasks, with one held-out task; return its metrics."""
    held_out = runs / "held_out.jsonl"
    first = (ROOT / "examples" / name / "held_out.jsonl").read_text().splitlines()[0]
    held_out.write_text(first + "\n")
    output = command(
        "train", "--config", f"examples/{name}/train.toml", "--runs", runs, "--name", "run",
        *flags(**SHORT, eval_tasks=held_out),
    )  # fmt: skip
    folder = RunFolder(runs / "run")
    [row] = [row for row in folder.read_metrics() if "reward/mean" in row]
    assert row["reward/missing"] == 0, output  # every rollout ended, and with a reward
    assert 0 <= row["reward/mean"] <= 1
    assert row["sampler_trainer/max_logprob_difference"] < 1e-4
    with contextlib.closing(Store(str(folder.store))) as store:
        accounting = store.accounting(folder.run_id.read_text())
    assert accounting.adds_up
    assert accounting.pending == 0
    return folder, row


def calls_of(folder: RunFolder, purpose: Purpose = Purpose.TRAIN) -> list[Call]:
    with contextlib.closing(Store(str(folder.store))) as store:
        rollouts = store.rollouts(folder.run_id.read_text(), purpose=purpose)
        return store.calls(rollout_ids=[rollout.id for rollout in rollouts])


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
    folder, _ = trained(name, tmp_path)
    requests = [call.request or {} for call in calls_of(folder)]
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
    calls = calls_of(trained("node_agent", tmp_path)[0])
    assert len(calls) == 8
    lines = (ROOT / "examples/node_agent/train.jsonl").read_text().splitlines()
    names = {json.loads(line)["name"] for line in lines}
    for call in calls:
        [message] = (call.request or {})["messages"]
        assert message["content"].split()[1].rstrip(".") in names


def test_two_agents(tmp_path: Path) -> None:
    """Two adapters over one base, trained together on the calls of their agents."""
    both = ("messenger", "impostor")
    folder, row = trained("two_agents", tmp_path)
    calls = calls_of(folder)
    assert {(call.model, call.adapter) for call in calls} == {(name, name) for name in both}
    assert {call.adapter for call in calls if call.trained_step == 1} == set(both)
    assert row["calls/trained"] == sum(row[f"{name}/calls/trained"] for name in both)
    for name in both:
        assert row[f"{name}/grad_norm"] > 0
        assert row[f"{name}/reward/mean"] == row["reward/mean"]  # one reward for both
    files = [folder.adapter / name / "adapter_model.safetensors" for name in both]
    assert len({file.read_bytes() for file in files}) == 2
    output = command(
        "eval", "examples/two_agents/agent.py:agent", "--tasks", tmp_path / "held_out.jsonl",
        "--runners", "1", "--adapter-path", folder.adapter, "--runs", tmp_path,
    )  # fmt: skip
    [evaluated] = tmp_path.glob("eval-*")
    calls = calls_of(RunFolder(evaluated), Purpose.EVAL)
    assert [call.adapter for call in calls] == list(both), output
