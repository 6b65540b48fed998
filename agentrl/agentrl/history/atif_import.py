"""Import ATIF trajectories, as Harbor's agents write them: the rollouts of a run that has ended.

An agent's step becomes a call. One with token ids and log-probs can train as if it had been
recorded here; of the others the messages and the counts of tokens are kept. A step's prompt is
shown as the steps before it, because trajectories do not say what else a model was told.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from agentrl.config.errors import ConfigError
from agentrl.runs.excerpts import json_line
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import (
    REWARD_RANGE,
    AttemptState,
    Call,
    CallState,
    Claim,
    Json,
    NewRollout,
    Purpose,
    Reward,
    SkipReason,
    is_reward,
    new_id,
)
from agentrl_tracer.store import Store
from agentrl_tracer.store.calls import Delivery

_ENDS = "stop"  # of an answer, where the step does not say it
_BOOT = "import"


def _text(content: Any) -> Any:
    """Return the text of a message or result, which may be a list of parts."""
    if not isinstance(content, list):
        return content or ""
    parts = [one if isinstance(one, dict) else {} for one in content]
    if other := [one.get("type") for one in parts if one.get("type") != "text"]:
        raise ValueError(f"has a part of the type {other[0]!r}; only text is imported")
    return "\n".join(str(one.get("text") or "") for one in parts)


_Text = Annotated[str, BeforeValidator(_text)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Logprob = Annotated[float, Field(ge=-1e9, le=1)]


class _Metrics(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[_TokenId] | None = None
    completion_token_ids: list[_TokenId] | None = None
    logprobs: list[_Logprob] | None = None

    @model_validator(mode="after")
    def _one_logprob_a_token(self) -> _Metrics:
        ids, logprobs = self.completion_token_ids, self.logprobs
        if ids and logprobs and len(ids) != len(logprobs):
            raise ValueError(
                f"logprobs has {len(logprobs)} numbers for {len(ids)} completion_token_ids"
            )
        return self


class _ToolCall(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Elsewhere(BaseModel):
    trajectory_path: str | None = None


class _Result(BaseModel):
    source_call_id: str | None = None
    content: _Text = ""
    subagent_trajectory_ref: list[_Elsewhere] | None = None


class _Observation(BaseModel):
    results: list[_Result]


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    message: _Text
    timestamp: datetime | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Json | None = None

    @property
    def is_call(self) -> bool:
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0


class _Agent(BaseModel):
    name: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None


class _Trajectory(BaseModel):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.")]
    agent: _Agent
    steps: Annotated[list[_Step], Field(min_length=1)]
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list[_Trajectory] | None = None
    extra: Json | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A rollout to import: its trajectory, and those that continue it or are its sub-agents'."""

    task: Json
    parts: Sequence[_Trajectory]
    rewards: Mapping[str, float]


def import_trajectories(paths: Iterable[Path], runs: Path, name: str | None) -> tuple[Path, int]:
    """Make a run of trajectories; return its folder and the number of rollouts.

    Args:
        paths: files of one trajectory (JSON) or of one a line (``.jsonl``), and folders of Harbor's
            trials, whose results give the rewards.

    Raises:
        ConfigError: names the file and the field that does not fit; nothing was written.
    """
    paths = list(paths)
    found = [one for path in paths for one in _read(path)]
    folder = RunFolder.create(runs, name, "import")
    folder.lock()
    settings = {"imported": [str(path) for path in paths]}
    with closing(Store(str(folder.store))) as store:
        run_id = store.create_run(folder.name, "import", settings)
        folder.write(folder.run_id, run_id)
        folder.write_json(folder.config, settings)
        _write(store, run_id, found)
        store.end_run(run_id, "finished")
    return folder.root, len(found)


# ---- read


def _read(path: Path) -> Iterator[_Found]:
    files = sorted(path.glob("**/trajectory.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path}: holds no trajectory.json; give a file, or a folder of trials")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        lines = text.split("\n") if file.suffix == ".jsonl" else [text]
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}" if len(lines) > 1 else str(file)
                trajectory = _parsed(line, where)
                yield _found(trajectory, [*_parts(trajectory, file, {file})], file)


def _parsed(text: str, where: str) -> _Trajectory:
    try:
        return _Trajectory.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {f'{place}: {said}'.lstrip('.: ')}") from error


def _parts(trajectory: _Trajectory, file: Path, seen: set[Path]) -> Iterator[_Trajectory]:
    """Yield a trajectory, its sub-agents', and those in files beside it that it names."""
    yield trajectory
    for embedded in trajectory.subagent_trajectories or ():
        yield from _parts(embedded, file, seen)
    observed = [step.observation.results for step in trajectory.steps if step.observation]
    refs = [
        ref for results in observed for one in results for ref in one.subagent_trajectory_ref or ()
    ]
    named = [*(ref.trajectory_path for ref in refs), trajectory.continued_trajectory_ref]
    for other in (file.parent / path for path in named if path):
        if other.parent != file.parent or not other.is_file():
            raise ConfigError(
                f"{file}: names the trajectory {other.name!r}, which is not beside it"
            )
        if other not in seen:
            seen.add(other)
            text = other.read_text(encoding="utf-8", errors="replace")
            yield from _parts(_parsed(text, str(other)), other, seen)


def _found(trajectory: _Trajectory, parts: Sequence[_Trajectory], file: Path) -> _Found:
    extra, task = trajectory.extra or {}, (trajectory.extra or {}).get("data")
    if not isinstance(task, dict):
        asked = (step.message for step in trajectory.steps if step.source == "user")
        task = {"instruction": next(asked, "")}
    rewards = extra.get("rewards", _verified(file))
    if not isinstance(rewards, dict):
        raise ConfigError(f"{file}: extra.rewards: give an object of numbers")
    for name, value in rewards.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and is_reward(value)):
            raise ConfigError(f"{file}: extra.rewards.{name}: {REWARD_RANGE}")
    return _Found(task, parts, rewards)


def _verified(file: Path) -> Json:
    """Return the rewards in the result of Harbor's trial, in whose folder ``agent`` the file is."""
    with suppress(OSError, ValueError, AttributeError):
        result = json.loads((file.parent.parent / "result.json").read_bytes())
        return (result.get("verifier_result") or {}).get("rewards") or {}
    return {}


# ---- write


def _write(store: Store, run_id: str, found: Sequence[_Found]) -> None:
    groups: dict[str, int] = {}
    places = [groups.setdefault(json_line(one.task), len(groups)) for one in found]
    tasks = store.add_tasks(run_id, "train", [json.loads(task) for task in groups])
    index = Counter[int]()
    new: list[NewRollout] = []
    for at in places:
        new.append(NewRollout(tasks[at], f"task-{at}", Purpose.TRAIN, 0, index[at], seed=0))
        index[at] += 1
    store.enqueue(run_id, new)
    store.register_gateway(_BOOT, run_id, 0)
    proxied = 0
    for one in found:
        claim = store.claim("import", 3600.0, run_id)
        assert claim is not None
        calls = [*_calls(claim, one.parts)]
        earned = [
            Reward(claim.attempt_id, claim.rollout_id, name, float(value), key=name)
            for name, value in one.rewards.items()
            if not name.startswith("human:")  # which stood beside the rewards
        ]
        proxied += len(calls)
        delivery = Delivery(claim.attempt_id, [], earned)
        store.write_calls(_BOOT, [], [*calls, delivery], proxied)
        store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)


def _calls(claim: Claim, parts: Sequence[_Trajectory]) -> Iterator[Call]:
    seq = 0
    for part in parts:
        said: list[Json] = []
        for step in part.steps:
            if step.is_call:
                yield _call(claim, seq, part.agent, step, [*said])
                seq += 1
            said += _messages(step)


def _messages(step: _Step) -> Iterator[Json]:
    """Yield a step as the messages that the next call is shown."""
    role = "assistant" if step.source == "agent" else step.source
    message: Json = {"role": role, "content": step.message}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": one.tool_call_id,
                "type": "function",
                "function": {"name": one.function_name, "arguments": json_line(one.arguments)},
            }
            for one in step.tool_calls
        ]
    yield message
    for result in step.observation.results if step.observation else ():
        told = {"tool_call_id": result.source_call_id} if result.source_call_id else {}
        yield {"role": "tool" if told else "user", "content": result.content, **told}


def _call(claim: Claim, seq: int, agent: _Agent, step: _Step, before: list[Json]) -> Call:
    metrics, extra = step.metrics or _Metrics(), step.extra or {}
    prompt, response = metrics.prompt_token_ids, metrics.completion_token_ids
    trains = bool(prompt and response and metrics.logprobs) and step.llm_call_count in (None, 1)
    model = step.model_name or agent.model_name or agent.name
    counted = {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
    }
    usage: Json = {"usage": counted} if any(counted.values()) else {"usage_unknown": True}
    reason = extra.get("skip_reason")
    if reason not in {*SkipReason}:
        reason = None if trains else SkipReason.NOT_TRAINABLE_MODEL
    at = step.timestamp.timestamp() if step.timestamp else time()
    name = new_id("chatcmpl-")
    message, finish = next(_messages(step)), extra.get("finish_reason") or _ENDS
    choice = {"index": 0, "message": message, "finish_reason": finish}
    version = extra.get("adapter_version")
    return Call(
        id=name, response_id=name, choice=0, run_id=claim.run_id, rollout_id=claim.rollout_id,
        attempt_id=claim.attempt_id, seq=seq, agent=str(extra.get("agent") or agent.name),
        model=model, adapter=model if trains else None,
        adapter_version=(version if isinstance(version, int) else 0) if trains else None,
        state=CallState.COMPLETED, prompt_ids=(prompt or []) if trains else [],
        response_ids=(response or []) if trains else [],
        response_logprobs=(metrics.logprobs or []) if trains else [],
        finish_reason=str(finish), params={} if trains else usage,
        request={"model": model, "messages": before}
        | ({"tools": agent.tool_definitions} if agent.tool_definitions else {}),
        response={"id": name, "object": "chat.completion", "model": model, "choices": [choice]},
        error=None, trace_id=None, span_id=None, started_at=at, ended_at=at,
        skip_reason=None if reason is None else SkipReason(reason),
    )  # fmt: skip
