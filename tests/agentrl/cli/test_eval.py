"""``agentrl eval``: a checkpoint of a run by its step, and models that other servers answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import agentrl
from peft import PeftModel
from served import Served
from tiny_policy import trained_run

from agentrl.runs.folder import RunFolder, find_adapters
from agentrl_tracer.schemas import Call
from agentrl_tracer.store import Store
from agentrl_trainer.models.loading import load_base

HELLO = Path(__file__).parents[3] / "examples" / "hello"


def test_a_checkpoint_by_step_is_compared_with_the_base_model(tmp_path: Path) -> None:
    """The log-probs of the answers are those of that version, and of no other."""
    run = trained_run(tmp_path)
    run.write_json(run.config, run.read_config() | {"sampler": {"max_tokens": 9}})
    tasks = ({"n": 1000, "level": "low"}, {"n": 1001, "level": "high"})
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = agentrl(
        "eval", f"{HELLO / 'agent.py'}:agent", "--tasks", tmp_path / "tasks.jsonl",
        "--adapter-path", f"{run.root}@3", "--adapter-path", "base", "--by", "level",
        "--fail-under", 0.9, "--runs", tmp_path, "--runners", 1,
    )  # fmt: skip
    missing = agentrl(
        "eval", f"{HELLO / 'agent.py'}:agent", "--tasks", tmp_path / "tasks.jsonl",
        "--adapter-path", "base", "--adapter-path", f"{run.root}@99", "--runs", tmp_path / "none",
    )  # fmt: skip
    assert missing.returncode == 2
    assert not (tmp_path / "none").exists()  # nothing ran before it was looked for
    said = f"{run.root}@3 was trained with --max-tokens 9, and is evaluated with 256"
    assert said in " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "trained@3: accuracy 0.0% is below 90.0%" in done.stdout
    assert "base: accuracy" not in done.stdout  # beside adapters it is what they are compared with
    first, second = sorted(tmp_path.glob("eval-*"))
    asked: list[list[list[int]]] = []
    for folder in (first, second):
        with contextlib.closing(Store(str(RunFolder(folder).store))) as store:
            asked.append(sorted(call.prompt_ids for call in store.calls()))
    assert asked[0] == asked[1]
    with contextlib.closing(Store(str(RunFolder(first).store))) as store:
        calls = store.calls()
    assert len(calls) == 2
    for call in calls:
        away = {at: distance(call, run.adapter_version("policy", at)) for at in (3, 7)}
        assert away[3] < 1e-3 < 1e-2 < away[7]
    assert find_adapters(f"{run.root}@3", "x") == {"policy": run.adapter_version("policy", 3)}
    for folder in (first, second):
        summary = json.loads((folder / "summary.json").read_text())
        assert [(row["field"], row["tasks"]) for row in summary["by"]] == [
            ("level = high", 1), ("level = low", 1),
        ]  # fmt: skip
        assert [row["model"] for row in summary["compared"]] == [f"{run.root}@3", "base"]
        assert [row["run"] for row in summary["compared"]] == [first.name, second.name]


def distance(call: Call, adapter: Path) -> float:
    """How far the recorded log-probs are from those of the base with an adapter, at most."""
    base = load_base("agentrl-tiny", device="cpu")
    model = PeftModel.from_pretrained(base.model, str(adapter)).eval()
    ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    found = scores[len(call.prompt_ids) - 1 :]
    return float((found - torch.tensor(call.response_logprobs)).abs().max())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with contextlib.closing(Served(tmp_path)) as running:
        yield running


def test_other_models_are_evaluated_with_intervals(served: Served, tmp_path: Path) -> None:
    config = tmp_path / "eval.toml"
    config.write_text(
        f'[agent]\nentrypoint = "{HELLO / "agent.py"}:agent"\n[rollouts]\nrunners = 2\n'
        f'[evaluation]\ntasks = "{HELLO / "held_out.jsonl"}"\nsamples = 2\ntemperature = 0.5\n'
        f'[run]\nfolder = "{tmp_path}"\n'
        f'[models.theirs]\nmodel = "openai/agentrl-tiny"\napi_base = "{served.url}/v1"\n'
    )
    done = agentrl("eval", "--config", config, "--answered-by", "theirs")
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = tmp_path.glob("eval-*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["not_enforced"] == {}
    for path in (folder / "store.db", served.store):
        with contextlib.closing(Store(str(path))) as store:
            asked = {call.params["temperature"] for call in store.calls()}
        assert asked == {0.5}  # ours, whatever the agent asks for
    assert (summary["tasks"], summary["rollouts"], summary["failures"]) == (24, 48, {})
    assert summary["pass_at_interval"]["1"] == summary["interval"]
    low, high = summary["interval"]
    assert low <= summary["accuracy"] <= high
    assert summary["pass_at"]["1"] == pytest.approx(summary["accuracy"])
    assert "pass@2" in done.stdout
    assert "95 % interval" in done.stdout
    for flags, said in (
        (("--answered-by", "ours"), "no [models.ours]"),
        (("--by", "m"), "evaluation.by: no task has a field 'm'"),
        (("--adapter-path", "base", "--adapter-path", "base"), "is there twice"),
    ):
        refused = agentrl("eval", "--config", config, *flags)
        assert refused.returncode == 2
        assert said in refused.stderr
