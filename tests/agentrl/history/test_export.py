"""Rollouts for other programs: every record, chats of successes, pairs of a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from call_records import make

from agentrl.config.errors import ConfigError
from agentrl.history.export import (
    chat_of,
    chat_records,
    pair_records,
    rollout_records,
    write_parquet,
)
from agentrl.history.sources import OpenRun


def test_a_record_has_the_task_the_rewards_and_the_calls_with_their_tokens(run: OpenRun) -> None:
    records = list(rollout_records(run, "step == 4"))
    assert len(records) == len({one["id"] for one in records}) == 8 + 6
    one = next(record for record in records if record["purpose"] == "eval")
    assert one["data"]["n"] == 12 + one["task"]
    assert set(one["rewards"]) == {"correct", "clarity"}
    first, second, _ = one["calls"]
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert len(first["response_logprobs"]) == len(first["response_ids"])
    with pytest.raises(ConfigError, match="'rewrd' is no column"):
        list(chat_records(run, "rewrd > 1"))


def test_chats_are_the_whole_conversations_of_successful_training_rollouts(run: OpenRun) -> None:
    chats = [chat["messages"] for chat in chat_records(run, "")]
    right = list(rollout_records(run, "reward >= 1 and purpose == 'train'"))
    assert len(chats) == 2 * len(right) > 0  # the solver's and the checker's
    solver = next(chat for chat in chats if len(chat) == 4)
    assert [message["role"] for message in solver] == ["user", "assistant", "tool", "assistant"]
    assert solver[1]["tool_calls"][0]["id"] == solver[2]["tool_call_id"]
    assert list(chat_records(run, "purpose == 'eval' and step == 0"))  # asked for


def test_a_pair_is_the_best_against_the_worst_of_a_group(run: OpenRun) -> None:
    pairs = list(pair_records(run, ""))
    rows = {row["id"]: row for row in rollout_records(run, "")}
    assert pairs
    for one in pairs:
        best, worst = (rows[name] for name in one["rollouts"])
        assert best["group"] == worst["group"]
        assert best["purpose"] == "train"
        assert one["reward_chosen"] == best["reward"] > worst["reward"] == one["reward_rejected"]
        assert one["chosen"][0] != one["rejected"][0]
        assert one["prompt"][0]["role"] == "user"


def test_calls_of_every_protocol_become_chats() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Yes."}}]}
    call = replace(make("x", [1], [2]), response=answer)
    said = [{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for response_id, request in (
        ("resp_1", {"instructions": "Be brief.", "input": "Is it?", "tools": [tool]}),
        ("msg_1", {"system": "Be brief.", "messages": said}),
    ):
        chat = chat_of(replace(call, response_id=response_id, request={"model": "m", **request}))
        assert chat is not None
        assert [one["role"] for one in chat["messages"]] == ["system", "user", "assistant"]
    assert chat_of(replace(call, response_id="cmpl-1", request={"prompt": "Once"})) is None
    assert chat_of(replace(call, response=None, request={"messages": []})) is None


def test_lone_surrogates_are_replaced_in_parquet(run: OpenRun, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    [record, *_] = rollout_records(run, "step == 4")
    write_parquet([record | {"data": {"n": "a\ud800b"}}], tmp_path / "r.parquet")
    assert parquet.read_table(tmp_path / "r.parquet")["data"][0].as_py() == '{"n": "a?b"}'
