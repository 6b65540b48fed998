"""Trajectories become rollouts: those of this export, and those that Harbor's trials leave."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from client_data import TINY

from agentrl import ServiceClient
from agentrl.config.errors import ConfigError
from agentrl.console.trace_tree import rollout_trace
from agentrl.history.atif import atif_records
from agentrl.history.atif_import import import_trajectories
from agentrl.history.export import row_records
from agentrl.history.rollout.conversation import asked
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import OpenRun, open_run
from agentrl.runs.folder import RunFolder
from agentrl_trainer.data.training_row import TrainingRow

STEPS: list[dict[str, Any]] = [
    {"source": "system", "message": "You work in a shell."},
    {"source": "user", "message": [{"type": "text", "text": "How many files?"}]},
    {
        "source": "agent", "message": "I look.", "reasoning_content": "Hm.", "model_name": "m",
        "tool_calls": [{"tool_call_id": "c1", "function_name": "sh", "arguments": {"cmd": "ls"}}],
        "observation": {"results": [{"source_call_id": "c1", "content": "a b"}]},
        "metrics": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_token_ids": [1, 2, 3],
                    "completion_token_ids": [4, 5], "logprobs": [-0.5, -0.25]},
    },
    {"source": "agent", "message": "copied", "is_copied_context": True},
    {"source": "agent", "message": "Two.", "metrics": {"prompt_tokens": 9, "completion_tokens": 1}},
]  # fmt: skip


def written(path: Path, steps: list[dict[str, Any]] = STEPS, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = [{"step_id": at, **step} for at, step in enumerate(steps, start=1)]
    agent = {"name": "terminus-2", "version": "2"}
    path.write_text(
        json.dumps({"schema_version": "ATIF-v1.8", "agent": agent, "steps": numbered} | more)
    )
    return path


def test_what_was_exported_comes_back_token_for_token(run: OpenRun, tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in atif_records(run, "")]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    folder, count = import_trajectories([tmp_path / "all.jsonl"], tmp_path / "runs", "back")
    assert count == len(lines) > 14
    with closing(open_run(RunFolder(folder))) as back:
        while back.fill():
            pass
        theirs, ours = ([*row_records(one, "")] for one in (run, back))
        kept = ("tokens", "mask", "logprobs", "adapter", "reward")
        told = [{name: row[name] for name in kept} for row in ours]
        assert told == [{name: row[name] for name in kept} for row in theirs] != []
        assert len({row["group"] for row in ours}) == len({row["group"] for row in theirs})
        assert back.store.verify(back.id).fault is None
        assert back.current()["state"] == "finished"
        again = [*atif_records(back, "")]
    for mine, line in zip(again, lines, strict=True):
        before = json.loads(line)
        assert [step["message"] for step in mine["steps"] if step["source"] == "agent"] == [
            step["message"] for step in before["steps"] if step["source"] == "agent"
        ]
        assert mine["extra"]["data"] == before["extra"]["data"]


def test_a_trial_of_harbor_is_a_rollout_with_its_verifiers_reward(tmp_path: Path) -> None:
    for at, reward in enumerate((1, 0.25)):
        trial = tmp_path / f"trials/t{at}"
        written(trial / "agent/trajectory.json")
        result = {"verifier_result": {"rewards": {"reward": reward}}}
        (trial / "result.json").write_text(json.dumps(result))
    folder, count = import_trajectories([tmp_path / "trials"], tmp_path, None)
    assert count == 2
    with closing(open_run(RunFolder(folder))) as run:
        while run.fill():
            pass
        rows = find_rollouts(run.index, Query("", sort="id")).rows
        assert [(row["reward"], row["index"], row["calls"]) for row in rows] == [
            (1, 0, 2), (0.25, 1, 2),
        ]  # fmt: skip
        assert len({row["group"] for row in rows}) == 1
        assert run.store.tasks(run.id, "train") == [{"instruction": "How many files?"}]
        [first, second] = run.store.calls(rollout_ids=[rows[0]["id"]])
        assert (first.prompt_ids, first.response_ids) == ([1, 2, 3], [4, 5])
        assert (second.tokens, second.skip_reason) == ((9, 1), "not_trainable_model")
        shown = asked(second.request)
        assert [one.role for one in shown] == ["system", "user", "assistant", "tool", "assistant"]
        assert (shown[2].tools[0].arguments, shown[3].text) == ('{"cmd": "ls"}', "a b")
        assert run.store.rollouts(run.id)[0].winner
        rollout_trace(run.store, run.store.rollouts(run.id)[0])
        made = [*row_records(run, "")]
    with ServiceClient(folder=tmp_path / "client") as service:
        client = service.create_lora_training_client(TINY, rank=4)
        rows = [
            TrainingRow(one["tokens"], one["mask"], one["logprobs"], [one["reward"]] * 5)
            for one in made
        ]
        client.forward_backward(rows, "importance_sampling").result()


def test_sub_agents_and_continuations_are_calls_of_the_rollout(tmp_path: Path) -> None:
    written(tmp_path / "next.json", [STEPS[3], STEPS[4]])
    inner = json.loads(written(tmp_path / "inner.json", STEPS[1:3]).read_text())
    file = written(
        tmp_path / "one.json", continued_trajectory_ref="next.json",
        subagent_trajectories=[inner | {"agent": {"name": "helper", "version": "1"}}],
    )  # fmt: skip
    folder, _ = import_trajectories([file], tmp_path, "all")
    with closing(open_run(RunFolder(folder))) as run:
        [rollout] = run.store.rollouts(run.id)
        calls = run.store.calls(rollout_ids=[rollout.id])
    assert [call.agent for call in calls] == ["terminus-2", "terminus-2", "helper", "terminus-2"]
    assert [len(asked(call.request)) for call in calls] == [2, 5, 1, 1]


PICTURE = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}


def changed(at: int, **values: Any) -> dict[str, Any]:
    return {"steps": [*STEPS[:at], {**STEPS[at], **values}, *STEPS[at + 1 :]]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schema_version": "2"}, "schema_version: String should match"),
        ({"steps": []}, "steps: List should have at least 1"),
        (changed(0, source="tool"), r"steps\[0\].source: "),
        (changed(1, message=[PICTURE]), r"steps\[1\].message: has a part of the type 'image'"),
        (changed(2, metrics={"completion_token_ids": [1], "logprobs": [-1, -1]}),
         r"steps\[2\].metrics: logprobs has 2 numbers for 1 completion_token_ids"),
        (changed(2, metrics={"prompt_token_ids": [2**31]}),
         r"steps\[2\].metrics.prompt_token_ids\[0\]"),
        (changed(2, metrics={"logprobs": ["x"]}), r"steps\[2\].metrics.logprobs\[0\]"),
        (changed(2, timestamp="noon"), r"steps\[2\].timestamp"),
        ({"extra": {"rewards": {"tests": "all"}}}, "extra.rewards.tests: a reward is a number"),
        ({"extra": {"rewards": {"tests": float("nan")}}}, "extra.rewards.tests: a reward is"),
        ({"continued_trajectory_ref": "../b.json"}, "names the trajectory 'b.json'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_field(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    file = written(tmp_path / "one.json", **wrong)
    with pytest.raises(ConfigError, match=f"one.json: .*{said}"):
        import_trajectories([written(tmp_path / "good.json"), file], tmp_path / "runs", "x")
    assert not (tmp_path / "runs").exists()


def test_files_that_are_no_trajectories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n{\n")
    with pytest.raises(ConfigError, match=r"a.jsonl, line 2: Invalid JSON"):
        import_trajectories([tmp_path / "a.jsonl"], tmp_path, None)
    with pytest.raises(ConfigError, match=r"holds no trajectory\.json"):
        import_trajectories([tmp_path], tmp_path, None)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        import_trajectories([tmp_path / "none.json"], tmp_path, None)
