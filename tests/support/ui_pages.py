"""Runs with known content for tests of pages.

``record_runs`` writes through the store's own functions, a second's work. The run ``known`` has
four steps of two groups, evaluations before, in the middle and after, two agents, a tool, an agent
that raised and one whose output is hostile. ``other`` learned less; ``served`` is no run folder.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from call_records import make
from store_records import claimed
from sweeps import record_sweep

from agentrl.config.commands import TrainConfig
from agentrl.history.sources import Sources
from agentrl.runs.folder import RunFolder
from agentrl.training.evaluation import plan_evaluation
from agentrl_tracer.schemas import (
    AttemptState,
    Call,
    Claim,
    Feedback,
    Json,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    SkipReason,
    Span,
)
from agentrl_tracer.store import Store
from agentrl_tracer.store.calls import Delivery
from agentrl_trainer.models.sources import resolve_model

_STEPS, _GROUPS, _MEMBERS, _TASKS = 4, 2, 4, 6
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\n"
    "<svg onload='window.hacked = 1'><circle r='9'/></svg>\n"
    "[click](javascript:window.hacked=1) ![pixel](https://elsewhere.invalid/pixel.png)\n"
    "<style>body { display: none }</style> \x1b[31mred\x1b[0m \u202eback\n"
    "</script></textarea></title>{{ 7 * 7 }}\n"
)
KINDS = ("first", "last", "wrong", "hostile", "failed", "long")
LONG_LINE = "long " * 2_000_000
TOOL_ANSWER = "The archive says: 17 comes after 16."


@dataclass
class Recorded:
    """A folder of runs, and what its pages are about."""

    root: Path
    name: str = "known"
    other: str = "other"
    ids: dict[str, str] = field(default_factory=dict)
    """Rollouts by what they show (``KINDS``), the group of the hostile one as ``group``, and its
    second call as ``call``."""

    @property
    def run(self) -> str:
        return f"/runs/{self.name}"

    @property
    def views(self) -> dict[str, str]:
        """The paths of the pages. A new page is tested in the browser by adding it here."""
        return {
            "runs": "/",
            "run": self.run,
            "rollouts": f"{self.run}/rollouts",
            "search": f"{self.run}/rollouts?where=reward>0&search=archive&sort=-reward",
            **{kind: f"{self.run}/rollouts/{self.ids[kind]}" for kind in KINDS},
            "call": f"{self.run}/calls/{self.ids['call']}",
            "raw": f"{self.run}/calls/{self.ids['call']}/raw",
            "evaluations": f"{self.run}/evaluations",
            "compare": f"/compare?run={self.name}&run={self.other}",
            "tokens": f"{self.run}/calls/{self.ids['call']}/tokens",
            "replay": f"{self.run}/calls/{self.ids['call']}/replay",
            "group": f"{self.run}/groups/{self.ids['group']}",
            "task": f"{self.run}/tasks/eval/{_TASKS - 1}",
            "calls": f"{self.run}/calls?verdict=other_agent",
            "feedback": f"/runs/{self.other}/rollouts/{self.ids['judged']}",
            "served": "/served/serve.db",
            "served call": "/served/serve.db/calls/call-1",
            "sweeps": "/sweeps",
            "sweep": "/sweeps/searched",
        }


def record_runs(root: Path) -> Recorded:
    """Write the runs of this module's description below ``root``."""
    recorded = Recorded(root)
    recorded.ids = record_run(root, recorded.name, hostile=True)
    judged = record_run(root, recorded.other, learns=0.4, learning_rate=0.02)["first"]
    recorded.ids["judged"] = judged
    with contextlib.closing(Store(str(root / recorded.other / "store.db"))) as store:
        [run] = store.runs()
        for thumb in (1, -1):
            given = Feedback(run["id"], judged, None, "quality", "Ann", thumb, comment=HOSTILE)
            store.add_feedback(given)
    record_served(root / "serve.db", 3)
    record_sweep(root, "searched")
    return recorded


def record_served(url: Path | str, count: int) -> None:
    """Write calls without a run, ``call-0`` being the oldest."""
    began = time.time() - 1000
    calls = [
        replace(
            make(f"call-{i}", [1], [2]), run_id=None, rollout_id=None, attempt_id=None,
            started_at=began + i, ended_at=began + i,
            request={"messages": [{"role": "user", "content": f"number {i}"}]},
        )
        for i in range(count)
    ]  # fmt: skip
    with contextlib.closing(Store(str(url))) as store:
        store.write_calls("boot", [], calls, count)


@contextlib.contextmanager
def begun(
    root: Path, name: str, kind: str, config: Json | None = None
) -> Iterator[tuple[Store, str]]:
    """Begin a run, without settings by default; give its store and id."""
    folder = RunFolder.create(root, name, kind)
    with contextlib.closing(Store(str(folder.store))) as store:
        run_id = store.create_run(name, kind, config or {}, Policies(on_error="retry"))
        folder.write(folder.run_id, run_id)
        folder.write_json(folder.config, config or {})
        yield store, run_id


def record_run(
    root: Path, name: str, *, learns: float = 0.75, hostile: bool = False, **learning: Any
) -> dict[str, str]:
    """Write one finished run; ``learns`` is the success rate at its end. Return ``Recorded.ids``"""
    config = TrainConfig.model_validate({
        "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
        "evaluation": {"tasks": "held_out.jsonl", "every": 2},
        "rollouts": {"batch_size": _GROUPS, "group_size": _MEMBERS}, "learning": learning,
        "run": {"name": name, "steps": _STEPS, "folder": str(root)},
    })  # fmt: skip
    settings = config.model_dump(mode="json")
    folder = RunFolder.create(root, name, "train")
    with contextlib.closing(Store(str(folder.store))) as store:
        run_id = store.create_run(name, "train", settings, Policies(on_error="drop"))
        folder.write(folder.run_id, run_id)
        folder.write_json(folder.config, settings)
        store.register_gateway("boot", run_id, 1)
        run = _Run(store, folder, run_id, learns)
        run.record(config, hostile)
        folder.write_json(folder.summary, {"cores_busy": {"start": 0.5, "rollouts": 0.9}})
        store.end_run(run_id, "finished")
    return run.ids


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{resolve_model('agentrl-tiny')}/tokenizer.json")


def tokens_of(text: str) -> list[int]:
    """Return the ids of agentrl-tiny, the model of the runs."""
    return _tokenizer().encode(text, add_special_tokens=False).ids


@dataclass
class _Run:
    store: Store
    folder: RunFolder
    run_id: str
    learns: float
    ids: dict[str, str] = field(default_factory=dict)
    proxied: int = 0

    def record(self, config: TrainConfig, hostile: bool) -> None:
        add = self.store.add_tasks
        tasks = add(self.run_id, "train", [_task(n) for n in range(_STEPS * _GROUPS)])
        held_out = add(self.run_id, "eval", [_task(12 + n) for n in range(_TASKS)])
        self._evaluate(held_out, config, 0)
        for step in range(1, _STEPS + 1):
            self._train(step, tasks[(step - 1) * _GROUPS :], hostile and step == _STEPS)
            version = str(self.folder.adapter_version("policy", step))
            self.store.publish_adapter(self.run_id, "policy", step, version, step)
            if step % config.evaluation.every == 0:
                self._evaluate(held_out, config, step)

    def _train(self, step: int, tasks: Sequence[str], hostile: bool) -> None:
        new = [
            NewRollout(tasks[at], f"{step}-{at}", Purpose.TRAIN, step, index, seed=index)
            for at in range(_GROUPS)
            for index in range(_MEMBERS)
        ]
        ids = self.store.enqueue(self.run_id, new)
        right = round(_MEMBERS * self.learns * step / _STEPS)
        kinds = ["hostile", "failed", "long"] if hostile else []
        for at, rollout_id in enumerate(ids):
            self._roll_out(rollout_id, at % _MEMBERS < right, "".join(kinds[at : at + 1]))
        self.ids |= {"last": ids[-1], "group": new[0].group_id}
        self.ids.setdefault("first", ids[0])
        calls = self.store.calls(rollout_ids=ids)
        failed = {self.ids.get("failed")} & set(ids)
        skipped = {c.id: SkipReason.OTHER_AGENT for c in calls if c.agent == "checker"}
        skipped |= {c.id: SkipReason.FAILED_ROLLOUT for c in calls if c.rollout_id in failed}
        if right in (0, _MEMBERS):
            skipped = {call.id: SkipReason.ZERO_ADVANTAGE for call in calls} | skipped
        trained = {call.id: step for call in calls if call.id not in skipped}
        self.store.settle(trained=trained, skipped=skipped, calls=calls)
        self._log(step, _metrics(step, right / _MEMBERS) | {"rollouts/failed": len(failed)})

    def _evaluate(self, tasks: Sequence[str], config: TrainConfig, step: int) -> None:
        """Task 0 stays right, the last stays wrong, the second becomes wrong, others right."""
        ids = self.store.enqueue(self.run_id, plan_evaluation(tasks, step, config.evaluation, 0))
        learned = self.learns * step / _STEPS
        right = [True, step == 0, *(i / (_TASKS - 3) < learned for i in range(_TASKS - 3)), False]
        for rollout_id, good in zip(ids, right, strict=True):
            self._roll_out(rollout_id, good, "")
        self.ids["wrong"] = ids[-1]
        calls = self.store.calls(rollout_ids=ids)
        skipped = {call.id: SkipReason.EVALUATION for call in calls}
        self.store.settle(trained={}, skipped=skipped, calls=calls)
        accuracy = sum(right) / len(right)
        self._log(step, {"eval/accuracy": accuracy, "seconds/evaluation": 2.5})

    def _log(self, step: int, row: dict[str, float]) -> None:
        self.folder.append_metrics({"step": step, **row})
        self.store.log_metrics(self.run_id, step, {"step": step, **row})

    def _roll_out(self, rollout_id: str, right: bool, kind: str) -> None:
        claim = claimed(self.store)
        assert claim.rollout_id == rollout_id
        if kind:
            self.ids[kind] = rollout_id
        if kind == "hostile":
            self.ids["call"] = f"chatcmpl-{claim.attempt_id}-1"
        said = {"hostile": HOSTILE, "long": LONG_LINE}.get(kind, "")
        number = claim.task["n"]
        answer = f"I am {number}." if right else f"I am the number after {number - 1}, I think."
        calls = _conversation(
            claim, answer, said, version=claim.step - (claim.purpose is Purpose.TRAIN)
        )
        spans = _spans(claim, calls, said or TOOL_ANSWER)
        rewards = [
            Reward(claim.attempt_id, rollout_id, name, value, name, span, explanation=why)
            for name, value, span, why in (
                ("correct", 1.0 if right else 0.0, spans[0].span_id, said[:500] or None),
                ("clarity", 0.0 if right else -0.5, None, "says more than the number"),
            )
        ]  # fmt: skip
        self.proxied += len(calls)
        delivered = Delivery(claim.attempt_id, spans, [] if kind == "failed" else rewards)
        self.store.write_calls("boot", [], [*calls, delivered], self.proxied)
        log = self.folder.logs / f"{rollout_id}-1.log"
        log.write_text(f"asking about {number}\n{HOSTILE}")
        state, error = AttemptState.SUCCEEDED, None
        if kind == "failed":
            state, error = AttemptState.ERROR, f"ValueError: no tool of this name\n{HOSTILE}"
        self.store.end_attempt(claim.attempt_id, state, error=error, log=str(log))


def _task(n: int) -> dict[str, Any]:
    return {"n": n, "level": "hard" if n % 3 else "easy", "question": f"Which number is {n}?"}


def _conversation(claim: Claim, answer: str, said: str, version: int) -> list[Call]:
    """The solver uses a tool and answers, in one conversation; the checker reads the answer."""
    ask = {"role": "user", "content": f"{claim.task['question']} {said}"}
    function = {"name": "look_up", "arguments": '{"n": 1}'}
    tool = {"id": "t1", "type": "function", "function": function}
    uses = {"role": "assistant", "content": None, "tool_calls": [tool]}
    result = {"role": "tool", "tool_call_id": "t1", "content": said or TOOL_ANSWER}
    answers = {"role": "assistant", "content": f"<think>Let me see.</think>**{answer}**\n\n{said}"}
    check = {"role": "user", "content": f"Is this right?\n\n```python\nprint({answer!r})\n```"}
    checks = {"role": "assistant", "content": "- It has a number.\n- It is *short*."}
    first = _call(claim, 0, "solver", [ask], uses, '<tool_call>{"n": 1}</tool_call>', version)
    second = _call(claim, 1, "solver", [ask, uses, result], answers, answer, version, after=first)
    return [first, second, _call(claim, 2, "checker", [check], checks, "It has a number.", version)]


def _call(
    claim: Claim, seq: int, agent: str, messages: list[Any], message: dict[str, Any], text: str,
    version: int, after: Call | None = None,
) -> Call:  # fmt: skip
    prompt = tokens_of(f"<|im_start|>user\n{str(messages[-1]['content'])[:300]}<|im_end|>\n")
    if after is not None:
        prompt = after.prompt_ids + after.response_ids + prompt
    sampled = tokens_of(text)
    name, now = f"chatcmpl-{claim.attempt_id}-{seq}", time.time()
    began = {"continued": True} if after else {"continued": False, "branched": "first_call"}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return replace(
        make(name, prompt, sampled, seq), run_id=claim.run_id, rollout_id=claim.rollout_id,
        attempt_id=claim.attempt_id, agent=agent, adapter="policy", adapter_version=version,
        response_logprobs=[-0.05 - 2 * abs(math.sin(7 * i + seq)) for i in range(len(sampled))],
        params={"temperature": 1.0, "max_tokens": 256, "seed": seq, "n": 1, **began},
        request={"model": "policy", "messages": messages, "max_tokens": 256},
        response={"id": name, "model": "policy", "choices": [choice], "usage": usage},
        trace_id=_hex(claim, 32), span_id=_hex(claim, 16, 2 + seq // 2),
        started_at=now - 3 + seq, ended_at=now - 2.2 + seq,
    )  # fmt: skip


def _spans(claim: Claim, calls: Sequence[Call], result: str) -> list[Span]:
    """The agent's function, the solver with its tool, and the checker."""

    def span(at: int, parent: int | None, name: str, start: float, end: float, **said: Any) -> Span:
        begin = calls[0].started_at
        return Span(
            _hex(claim, 32), _hex(claim, 16, at), parent and _hex(claim, 16, parent), name,
            "internal", int((begin + start) * 1e9), int((begin + end) * 1e9), "unset",
            {key.replace("__", "."): value for key, value in said.items()}, [],
            {"service.name": "agentrl-agent"}, claim.rollout_id, claim.attempt_id,
        )  # fmt: skip

    tool = {"gen_ai__tool__name": "look_up", "gen_ai__tool__call__arguments": '{"n": 1}'}
    return [
        span(1, None, "invoke_workflow agent", -0.1, 3.1, agentrl__output=result),
        span(2, 1, "invoke_agent solver", 0, 1.9, gen_ai__agent__name="solver"),
        span(4, 2, "execute_tool look_up", 0.8, 1, gen_ai__tool__call__result=result, **tool),
        span(3, 1, "invoke_agent checker", 1.9, 3, gen_ai__agent__name="checker"),
    ]


def _hex(claim: Claim, digits: int, at: int = 0) -> str:
    return f"{claim.attempt_id}{at:08x}"[-digits:].zfill(digits)


def _metrics(step: int, reward: float) -> dict[str, float]:
    return {
        "reward/mean": reward, "reward/std_over_groups": 0.5 - reward / 4, "groups/used": _GROUPS,
        "tokens/sampled": 400 + 10 * step, "tokens_per_second": 300.0 + step,
        "staleness/mean": 0.1 * step, "loss": -0.01 * step, "entropy": 2.5 - step / 4,
        "clip_fraction": 0.02 * step, "sampler_trainer/kl": 1e-6, "learning_rate": 1e-3,
        "sampler_trainer/mean_logprob_difference": 1e-5, "answers/tokens": 9.0 + step,
        "seconds/rollouts": 6.0, "seconds/update": 4.0, "seconds/checkpoint": 0.3,
        "seconds/publish": 0.6,
    }  # fmt: skip


# ---- pages that are served, and a browser


def fill_indexes(root: Path) -> None:
    """Index the rollouts of all runs below ``root`` now, which pages do in the background."""
    with contextlib.closing(Sources(root)) as sources:
        for run in sources.all()[0]:
            while run.fill():
                pass
