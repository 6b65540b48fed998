"""A check's records give every line of its report; the update is a real one of the tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from call_records import make, rollout

from agentrl.check.examine import examine
from agentrl.check.resources import MemoryNeed, memory_findings
from agentrl.check.rollouts import call_findings
from agentrl.config.commands import CheckConfig
from agentrl.findings import Finding
from agentrl_tracer.schemas import Call, Rollout

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


def test_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, calls = records()
    rewards: dict[str, float | None] = {"r0": 0.0, "r1": 1.0, "r2": 0.0, "r3": None}
    found = examine(config(), 10, rollouts, calls, rewards)
    said = {name: [str(one) for one in some] for name, some in found.items()}
    assert said["template"] == [
        "knows tools",
        "thinking is up to the model; there is no switch",
        "keeps earlier turns unchanged, so that calls can continue",
    ]
    assert said["calls"] == [
        "2 a rollout",
        "4 of 4 later calls continue the one before, token for token",
    ]
    assert said["tokens"][:2] == [
        "a prompt has 8, an answer 6; a rollout samples 12",
        "the longest trajectory has 18 of at most 2048",
    ]
    assert said["tokens"][2].startswith(
        "8 of 8 answers were cut off at max_tokens 6: raise --max-tokens, or what the agent"
    )
    assert "free on cpu, fits" in said["memory"][0]
    assert said["memory"][-1].endswith("KV cache of 3 x 18 tokens")
    # 4 rollouts of 12 tokens took 2 s, one after the other: 64 take 32 s.
    assert said["time"][1] == "rollouts 32 s: 64 of them by 3 runners, at 24 sampled tokens/s"
    assert said["time"][2].startswith("update at most ")
    assert "in about 7 of 16 groups of 4 rollouts" in said["signal"][0]


def test_calls_that_are_too_long_are_said() -> None:
    rollouts, calls = records()
    found = examine(config(learning={"max_length": 10}), 10, rollouts, calls, dict.fromkeys(
        (one.id for one in rollouts), 0.0))  # fmt: skip
    said = " ".join(map(str, found["tokens"]))
    assert "4 calls are longer and would not train: raise learning.max_length" in said


def test_branches_are_named_with_their_reason() -> None:
    _, calls = records()
    edited = [
        replace(call, params={**call.params, "branched": "history_edited"}) if call.seq else call
        for call in calls[:4]
    ]
    said = [str(one) for one in call_findings(edited, 2)]
    assert said[1] == "0 of 2 later calls continue the one before, token for token"
    assert said[2].startswith("2 do not, because the agent sent an earlier message otherwise")
    assert "(history_edited)" in said[2]


def test_an_agent_that_asks_another_model_is_told_where_to_ask() -> None:
    _, calls = records()
    other = [replace(call, prompt_ids=[], response_ids=[], model="gpt-4o") for call in calls]
    [found] = call_findings(other, 4)
    assert found.fact == "none in 4 rollouts: they asked gpt-4o"
    assert "OPENAI_BASE_URL" in found.fix


@pytest.mark.parametrize(
    ("parts", "free", "fix"),
    [
        ({"weights": 3 * 10**9}, 10**10, ""),
        ({"weights": 3 * 10**9}, None, ""),
        ({"weights": 3 * 10**9}, 10**9, "model.load_in_4bit"),
        ({"weights": 10**9, "activations of 4096 tokens": 3 * 10**9}, 2 * 10**9,
         "learning.micro_batch_tokens"),
        ({"weights": 10**9, "KV cache": 3 * 10**9}, 2 * 10**9, "--runners"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_what_to_lower(
    parts: dict[str, int], free: int | None, fix: str
) -> None:
    found: Finding = memory_findings(MemoryNeed(parts, "cpu", free), config())[0]
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)
