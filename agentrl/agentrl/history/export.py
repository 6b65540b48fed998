"""Export the rollouts of a run: whole, as chats to imitate, or as pairs to prefer between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.history.conversation import answered, asked, shown_before
from agentrl.history.evaluations import success_reward
from agentrl.history.rollout_table import Query, Row, find_rollouts
from agentrl.history.sources import OpenRun
from agentrl_proxy.protocols.conversion import chat_of_messages, chat_of_response
from agentrl_tracer.schemas import Call, CallState, Json
from agentrl_trainer.data.rewards import by_rollout

_BATCH = 100  # rollouts whose calls are in memory


def rollout_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the rollouts that match with their task and all their calls, in order of time.

    Raises:
        ConfigError: ``where`` is wrong. So do the other functions here.
    """
    tasks: dict[str, list[Json]] = {}
    splits = {row["id"]: row for row in _rows(run, where)}
    for batch in _batches(list(splits.values())):
        ids = [row["id"] for row in batch]
        task_ids = {one.id: one.task_id for one in run.store.rollouts(run.id, ids=ids)}
        calls = by_rollout(run.store.calls(rollout_ids=ids))
        for row in batch:
            split = task_ids[row["id"]].split("-", 1)[1].rpartition("-")[0]
            known = tasks.setdefault(split, run.store.tasks(run.id, split))
            yield row | {
                "split": split,
                "data": known[row["task"]],
                "calls": [asdict(call) for call in calls[row["id"]]],
            }


def chat_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the conversations of successful rollouts: OpenAI's ``messages`` and ``tools``.

    Those of evaluations are left out unless ``where`` says something of ``purpose``.
    """
    threshold = success_reward(run)
    rows = _rows(run, _trained(run, where))
    rows = [row for row in rows if row["reward"] is not None and row["reward"] >= threshold]
    for batch in _batches(rows):
        chats = _chats(run, [row["id"] for row in batch])
        for row in batch:
            yield from chats[row["id"]]


def pair_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the best and the worst rollout of each group as ``prompt``, ``chosen``, ``rejected``.

    The prompt is what both conversations begin with. Groups with equal rewards have no pair.
    Evaluations are left out as by ``chat_records``.
    """
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in _rows(run, _trained(run, where)):
        if row["reward"] is not None:
            groups[row["group"]].append(row)
    ends = [(max(each, key=_reward), min(each, key=_reward)) for each in groups.values()]
    pairs = [(best, worst) for best, worst in ends if _reward(best) > _reward(worst)]
    for batch in _batches(pairs):
        chats = _chats(run, [row["id"] for pair in batch for row in pair])
        for best, worst in batch:
            chosen, rejected = (_longest(chats[one["id"]]) for one in (best, worst))
            shared = next(
                (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0
            )
            if shared:
                yield {
                    "prompt": chosen[:shared],
                    "chosen": chosen[shared:],
                    "rejected": rejected[shared:],
                    "reward_chosen": best["reward"],
                    "reward_rejected": worst["reward"],
                    "rollouts": [best["id"], worst["id"]],
                }


def _rows(run: OpenRun, where: str) -> list[Row]:
    return find_rollouts(run.index, Query(where, sort="id", limit=-1)).rows


def _trained(run: OpenRun, where: str) -> str:
    """Leave out the evaluations of a training: their tasks are held out."""
    if run.row["kind"] != "train" or "purpose" in where:
        return where
    return f'purpose == "train" and ({where})' if where.strip() else 'purpose == "train"'


def _reward(row: Row) -> float:
    return row["reward"]


def _longest(chats: Sequence[Json]) -> list[Json]:
    return max((chat["messages"] for chat in chats), key=len, default=[])


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for at in range(0, len(items), _BATCH):
        yield items[at : at + _BATCH]


def _chats(run: OpenRun, ids: Sequence[str]) -> dict[str, list[Json]]:
    """Return the conversations of each rollout's winning attempt, as they ended."""
    winners = [one.winner for one in run.store.rollouts(run.id, ids=ids) if one.winner]
    calls = by_rollout(run.store.calls(attempt_ids=winners))
    return {one: _conversations(calls[one]) for one in ids}


def _conversations(calls: Sequence[Call]) -> list[Json]:
    """Return a chat for each call that no later one continues."""
    done = [call for call in calls if call.state is CallState.COMPLETED]
    questions = [asked(call.request) for call in done]
    chats: list[Json] = []
    for at, call in enumerate(done):
        answer = answered(call)
        whole = [*questions[at], *([answer] if answer else [])]
        later = questions[at + 1 :]
        if shown_before(whole, later) < len(whole) and (chat := _chat(call)):
            chats.append(chat)
    return chats


def _chat(call: Call) -> Json | None:
    """Return a call as a chat; None for completions, and for what only a provider understands."""
    convert = {"resp_": chat_of_response, "msg_": chat_of_messages}
    prefix = call.response_id.partition("_")[0] + "_"
    try:
        request = convert.get(prefix, dict)(call.request or {})
        answer = (call.response or {})["choices"][0]["message"]
        messages = [*request["messages"], {"role": "assistant", **answer}]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    return {"messages": messages} | ({"tools": request["tools"]} if request.get("tools") else {})
