"""Export rollouts as ATIF, Harbor's Agent Trajectory Interchange Format, with their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import agentrl
from agentrl.history.export import rollout_records
from agentrl.history.rollout.conversation import Message, answered, asked, shown_before
from agentrl.history.rollout.trace import earned_by_name
from agentrl.history.sources import OpenRun
from agentrl_tracer.schemas import Call, CallState, Json

_VERSION = "ATIF-v1.7"


def atif_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield a trajectory of each rollout's winning attempt; one without an answer has none.

    An agent's step is a call, with the token ids of its prompt and its answer, and the log-probs.
    Between calls stand the messages that were new to the model; results of tools are observations.
    """
    for record in rollout_records(run, where):
        [rollout] = run.store.rollouts(run.id, ids=[record["id"]])
        calls = [Call(**one) for one in record["calls"] if one["attempt_id"] == rollout.winner]
        done = [call for call in calls if call.state is CallState.COMPLETED]
        if done:
            counting = earned_by_name(rollout, run.store.rewards([rollout.id]), aside=False)
            people = {n: v for n, v in (record["rewards"] or {}).items() if n.startswith("human:")}
            record["rewards"] = counting | people
            yield _trajectory(record, sorted(done, key=lambda call: (call.seq, call.choice)))


def _trajectory(record: Json, calls: Sequence[Call]) -> Json:
    steps: list[Json] = []
    before: list[list[Message]] = []
    for call in calls:
        request = asked(call.request)
        for message in request[shown_before(request, before) :]:
            _add_message(steps, message)
        steps.append(_agent_step(call))
        before.append([*request, *filter(None, [answered(call.response)])])
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    return {
        "schema_version": _VERSION,
        "session_id": record["id"],
        "trajectory_id": record["id"],
        "agent": {"name": calls[0].agent or "agent", "version": f"agentrl {agentrl.__version__}"},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
            "total_completion_tokens": sum(len(call.response_ids) for call in calls),
            "total_steps": len(steps),
        },
        "extra": {name: value for name, value in record.items() if name != "calls"},
    }


def _add_message(steps: list[Json], message: Message) -> None:
    """Add what the model was shown: a step, or a tool's result as the last call's observation."""
    if message.role == "tool":
        for step in reversed(steps):
            known = {one["tool_call_id"] for one in step.get("tool_calls", ())}
            if message.call in known or (not message.call and known):
                result: Json = {"content": message.text}
                result |= {"source_call_id": message.call} if message.call else {}
                step.setdefault("observation", {"results": []})["results"].append(result)
                return
    role = {"system": "system", "developer": "system", "assistant": "agent"}
    step: Json = {"source": role.get(message.role, "user"), "message": message.said}
    if step["source"] == "agent":  # said by another model, or changed by the agent
        step["is_copied_context"] = True
    steps.append(step)


def _agent_step(call: Call) -> Json:
    said = answered(call.response)
    step: Json = {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(call.started_at, UTC).isoformat(),
        "model_name": call.adapter or call.model,
        "message": said.text if said else "",
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(call.prompt_ids),
            "completion_tokens": len(call.response_ids),
            "prompt_token_ids": call.prompt_ids,
            "completion_token_ids": call.response_ids,
            "logprobs": call.response_logprobs,
        },
        "extra": {
            "call": call.id,
            "agent": call.agent,
            "adapter_version": call.adapter_version,
            "finish_reason": call.finish_reason,
            "skip_reason": call.skip_reason,
        },
    }
    if said and said.reasoning:
        step["reasoning_content"] = said.reasoning
    if tools := _tool_calls(call.response):
        step["tool_calls"] = tools
    return step


def _tool_calls(response: Any) -> list[Json]:
    match response:
        case {"choices": [{"message": {"tool_calls": list(called)}}, *_]}:
            return [_tool_call(one) for one in called if isinstance(one, dict)]
        case _:
            return []


def _tool_call(called: Json) -> Json:
    inner: Json = called.get("function") or called.get("custom") or {}
    text: Any = inner.get("arguments", inner.get("input"))
    try:
        arguments = json.loads(text)
    except (TypeError, ValueError):
        arguments = None
    return {
        "tool_call_id": str(called.get("id")),
        "function_name": str(inner.get("name")),
        "arguments": arguments if isinstance(arguments, dict) else {"text": text},
    }
