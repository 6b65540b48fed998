"""A check's records give every line of its report; the update is a real one of the tiny model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_records import make, rollout

from agentrl.check import resources
from agentrl.check.agents_memory import AgentsMemory
from agentrl.check.report import findings
from agentrl.check.resources import compare, time_finding
from agentrl.config.commands import CheckConfig
from agentrl_tracer.schemas import Call, Rollout
from agentrl_trainer.tiny import MODEL_DIR

TASKS, SAMPLES = 2, 2


def config(**changes: Any) -> CheckConfig:
    agent = {"entrypoint": "a:b", "tasks": "t"}
    return CheckConfig.model_validate(
        {"agent": agent, "sampler": {"max_tokens": 6}, "rollouts": {"runners": 3}} | changes
    )


def records() -> tuple[list[Rollout], list[Call]]:
    """Of each rollout two calls, the second of which continues the first; all are cut off."""
    rollouts: list[Rollout] = []
    calls: list[Call] = []
    for at in range(TASKS * SAMPLES):
        name = f"r{at}"
        one = rollout(name, task=f"task-{at // SAMPLES}")
        rollouts.append(replace(one, started_at=0.5 * at, ended_at=0.5 * at + 0.5))
        prompt, answer = [5, 6, 7 + at // SAMPLES], [8, 9 + at, 10, 11, 12, 13]
        for seq, (before, branched) in enumerate([([], "first_call"), (prompt + answer, None)]):
            calls.append(
                make(
                    f"{name}-{seq}", [*before, *prompt], answer, seq, rollout_id=name,
                    attempt_id=f"{name}-a", adapter=None, adapter_version=None,
                    finish_reason="length", request={"tools": []},
                    response_logprobs=[-1.0] * 6,
                    params={"max_tokens": 6, "branched": branched, "continued": bool(seq)},
                )
            )  # fmt: skip
    return rollouts, calls


def said(rewards: list[float | None], *records: Any, **changes: Any) -> dict[str, list[str]]:
    rollouts, calls = records
    earned = {one.id: reward for one, reward in zip(rollouts, rewards, strict=True)}
    held = AgentsMemory(lambda: None)
    held.idle, held.peak = 6 * 10**7, 36 * 10**7
    found, verdict = findings(config(**changes), 10, rollouts, calls, earned, held)
    return {name: [*map(str, some)] for name, some in {**found, "verdict": [verdict]}.items()}


def test_every_line() -> None:
    found = said([0.0, 1.0, 0.0, None], *records())
    assert found["template"] == [
        "knows tools, which no calls sent", "knows thinking, has no switch for it",
    ]  # fmt: skip
    assert found["calls"] == [
        "2 a rollout", "4 of 4 later calls continue the one before, token for token",
    ]  # fmt: skip
    assert found["tokens"][0] == (
        "a prompt has 8, an answer 6; a rollout samples 12; the longest trajectory has 18 of at "
        "most 2048"
    )
    assert found["tokens"][1].startswith(
        "8 of 8 answers were cut off at max_tokens 6: raise --max-tokens; an answer"
    )
    assert found["tokens"][2] == "no answer contains reasoning"
    assert found["success"][0].startswith("25% of 4 rollouts of 2 tasks earn at least 1 (95 %")
    assert found["success"][0].endswith(", pass@2 50%")
    assert found["success"][1].startswith("1 of 4 rollouts have no reward: return a number")
    assert found["memory"][0].endswith(" free on cpu: fits")
    # 3 runners, with 18 tokens each, and 100 MB beside the 60 MB that they share.
    assert found["memory"][1].endswith("KV cache of 54 tokens + 360.0 MB 3 agents")
    # 4 rollouts took 2 s, one after the other: 64 take 32 s.
    assert "(rollouts 32.0 s, update " in found["time"][0]
    [verdict] = found["verdict"]
    assert verdict.startswith("grpo will have a signal: in about 8 of 16 groups of 4 rollouts")


def test_what_a_row_cannot_hold_is_said() -> None:
    """Calls that are too long, and those that do not continue."""
    rollouts, calls = records()
    reasons = iter(["history_edited", "new_conversation", "reply_cut", "history_edited"])
    edited = [
        replace(call, params={**call.params, "branched": next(reasons)}) if call.seq else call
        for call in calls
    ]
    found = said(
        [0.0] * 4, rollouts, edited, learning={"max_length": 10}, sampler={"kv_tokens": 20}
    )
    assert found["tokens"][0].endswith(
        " 18 of at most 10: raise learning.max_length: longer ones do not train"
    )
    assert "KV cache of 20 tokens" in found["memory"][1]
    assert found["calls"][1] == (
        "0 of 4 later calls continue the one before, token for token; the others train as rows of "
        "their own, which takes longer (history edited 2, new conversation 1, reply cut 1)"
    )


def test_an_agent_that_does_not_ask_the_model_is_told_where_to_ask() -> None:
    rollouts, calls = records()
    other = [replace(call, prompt_ids=[], response_ids=[], model="gpt-4o") for call in calls]
    [verdict] = said([1.0] * 4, rollouts, other)["verdict"]
    assert verdict.startswith("nothing would train: the agent asked gpt-4o: the model")
    [verdict] = said([1.0] * 4, rollouts, [])["verdict"]
    assert "the agent asked no model" in verdict


def test_tools_that_the_model_never_sees_are_said(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL_DIR, tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    rollouts, calls = records()
    asked = [replace(call, request={"tools": [{}]}) for call in calls]
    found = said([1.0] * 4, rollouts, asked, model={"name": str(folder)})
    assert found["template"][0].startswith(
        "does not know tools, which 8 calls sent: choose a model"
    )


def test_a_training_that_does_not_fit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "free_memory", lambda _: 10**6)
    found = said([0.0, 1.0, 0.0, 1.0], *records())
    assert found["verdict"] == [found["memory"][0]]
    assert "does not fit: " in found["verdict"][0]
    assert "update" not in found["time"][0]


@pytest.mark.parametrize(
    ("parts", "free", "fix"),
    [
        ({"weights": 3 * 10**9}, 10**10, ""),
        ({"weights": 3 * 10**9}, 10**9, "load_in_4bit or learning.shard_base"),
        ({"weights": 10**9, "activations of 4096 tokens": 3 * 10**9}, 2 * 10**9,
         "learning.micro_batch_tokens"),
        ({"weights": 10**9, "KV cache": 3 * 10**9}, 2 * 10**9, "--runners"),
        ({"weights": 10**9, "8 agents": 3 * 10**9}, 2 * 10**9, "--runners"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_what_to_lower(
    parts: dict[str, int], free: int, fix: str
) -> None:
    found = compare(parts, free, "cpu")
    assert fix in found.fix
    assert found.stops == bool(fix) == bool(found.fix)


def test_an_update_takes_as_long_as_groups_teach() -> None:
    assert time_finding(20, 6.0, 4.0, 0.5).fact == (
        "a step 8.0 s (rollouts 6.0 s, update 2.0 s, or 4.0 s where every group teaches); "
        "20 steps 0:02:40 and the evaluations"
    )
    assert time_finding(20, 6.0, None, 0.5).fact.startswith("a step 6.0 s (rollouts 6.0 s); 20")
