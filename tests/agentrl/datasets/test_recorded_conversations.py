"""Rollouts of several conversations, from imported trajectories: what is compared and imitated."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl.config.commands import PreferConfig, SftConfig
from agentrl.datasets.recorded import run_pairs, run_samples
from agentrl.history.atif import atif_records
from agentrl.history.atif_import import import_trajectories
from agentrl.history.export import chat_records, pair_records
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Reward
from agentrl_tracer.store import Store

PLAN, SOLVE = [1, 2, 3], [4, 5, 6]  # prompts


def part(
    name: str, asked: str, prompt: list[int] | None, said: str, answer: list[int]
) -> dict[str, Any]:
    """A conversation of one call; without a prompt's tokens of another server's model."""
    metrics: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": len(answer)}
    if prompt:
        metrics |= {"prompt_token_ids": prompt, "completion_token_ids": answer}
        metrics["logprobs"] = [-0.1] * len(answer)
    step = {"source": "agent", "message": said, "model_name": name, "metrics": metrics}
    user = {"step_id": 1, "source": "user", "message": asked}
    agent = {"name": name, "version": "1", "model_name": name}
    return {"schema_version": "ATIF-v1.7", "agent": agent, "steps": [user, {"step_id": 2, **step}]}


def imported(folder: Path, rollouts: list[tuple[list[dict[str, Any]], float | None]]) -> Path:
    """A run of rollouts of one task, each of some conversations, with a reward."""
    lines: list[str] = []
    for (first, *others), reward in rollouts:
        rewards = {} if reward is None else {"rewards": {"reward": reward}}
        extra = {"data": {"q": "x"}, **rewards}
        lines.append(json.dumps({**first, "subagent_trajectories": others, "extra": extra}))
    (folder / "all.jsonl").write_text("\n".join(lines))
    return import_trajectories([folder / "all.jsonl"], folder / "runs", "made")[0]


def two_roles(folder: Path) -> Path:
    """The planner's answer is the longest of the good rollout, the solver's of the bad one."""
    good = [part("m", "Plan.", PLAN, "good", [7] * 9), part("m", "Solve.", SOLVE, "ok", [8] * 2)]
    bad = [part("m", "Plan.", PLAN, "bad", [9] * 3), part("m", "Solve.", SOLVE, "no", [6] * 9)]
    return imported(folder, [(good, 1.0), (bad, 0.0)])


def sft(run: Path, **data: Any) -> list[list[int]]:
    config = {"data": {"from_run": run, **data}, "model": {"name": "agentrl-tiny"}}
    return [one.rows[0].tokens for one in run_samples(SftConfig.model_validate(config)).kept]


def test_answers_to_the_same_prompt_are_compared(tmp_path: Path) -> None:
    config = {"data": {"from_run": two_roles(tmp_path)}, "model": {"name": "agentrl-tiny"}}
    found = run_pairs(PreferConfig.model_validate(config))
    [pair] = found.kept
    prompts = [row.tokens[: row.mask.index(True)] for row in pair.rows]
    assert prompts[0] == prompts[1]
    assert found.left_out["rows beside the longest that answer the same prompt"] == 2


def test_rollouts_without_a_prompt_in_common_are_counted(tmp_path: Path) -> None:
    run = imported(
        tmp_path,
        [
            ([part("m", "Plan.", PLAN, "good", [7])], 1.0),
            ([part("m", "Solve.", SOLVE, "no", [6])], 0.0),
        ],
    )
    config = {"data": {"from_run": run}, "model": {"name": "agentrl-tiny"}}
    found = run_pairs(PreferConfig.model_validate(config))
    assert not found.kept
    assert found.left_out["groups whose best and worst rollouts answer no prompt in common"] == 1


def test_an_unrewarded_rollout_is_not_the_best(tmp_path: Path) -> None:
    rollouts = [
        ([part("m", "Plan.", PLAN, str(at), [at])], reward)
        for at, reward in ((7, None), (8, -0.1), (9, -0.9))
    ]
    run = imported(tmp_path, rollouts)
    for where in (None, "step >= 0"):
        assert sft(run, best_of=1, where=where) == [[*PLAN, 8]]


def test_the_last_answer_of_a_rollout_is_one(tmp_path: Path) -> None:
    run = two_roles(tmp_path)
    assert sft(run, train_on="last") == [[*SOLVE, 8, 8]]
    assert len(sft(run)) == 2


def test_chats_and_pairs_are_of_models_that_are_sampled_here(tmp_path: Path) -> None:
    def rollout(said: str, token: int) -> list[dict[str, Any]]:
        user = part("user", "Play the user.", None, f"a long question: {said}", [1] * 50)
        return [part("m", "Plan.", PLAN, said, [token]), user]

    run = imported(tmp_path, [(rollout("good", 7), 1.0), (rollout("bad", 8), 0.0)])
    with closing(open_run(RunFolder(run))) as opened:
        while opened.fill():
            pass
        [pair] = pair_records(opened, "")
        chats = [*chat_records(opened, "")]
    assert [pair[name][0]["content"] for name in ("prompt", "chosen", "rejected")] == [
        "Plan.", "good", "bad",
    ]  # fmt: skip
    assert [chat["messages"][-1]["content"] for chat in chats] == ["good"]


def test_rewards_that_were_set_aside_do_not_come_back(tmp_path: Path) -> None:
    run = two_roles(tmp_path)
    with closing(Store(str(run / "store.db"))) as store:
        [row] = store.runs()
        rollouts = store.rollouts(row["id"])
        zeros = [Reward(one.winner or "", one.id, "zero", 0.0, key="zero") for one in rollouts]
        store.set_scores([one.attempt_id for one in zeros], ["zero"], zeros, alone=True)
    with closing(open_run(RunFolder(run))) as opened:
        while opened.fill():
            pass
        records = [*atif_records(opened, "")]
    assert [one["extra"]["rewards"] for one in records] == [{"zero": 0.0}] * 2
