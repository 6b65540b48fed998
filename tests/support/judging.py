"""A provider that plays a judge, a gateway that reaches it, and traces to judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_server import LocalServer
from provider_servers import said, trouble
from scripted_sampler import OPERATOR_KEY, Running

from agentrl.config.settings.models import OtherModelSettings
from agentrl.scoring.functions import ScoringContext
from agentrl.scoring.trace import Trace, read_traces
from agentrl_tracer.schemas import AttemptState

Says = Callable[[Any], Any]
"""What the judge says of the data that it is given: an object (JSON), or a text."""


class JudgeServer(LocalServer):
    """Answers as ``says`` says: with JSON, a text, a whole completion, or a failure's status."""

    says: Says = staticmethod(lambda data: 500)

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.bodies: list[Any] = []
        super().__init__()

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        self.bodies.append(json.loads(body))
        data = json.loads(self.bodies[-1]["messages"][1]["content"])
        self.seen.append(data)
        answer, kind = self.says(data), {"content-type": "application/json"}
        if isinstance(answer, int):
            return answer, json.dumps(trouble("out of order")).encode(), kind
        if "choices" not in answer:
            answer = said(answer if isinstance(answer, str) else json.dumps(answer))
        return 200, json.dumps(answer).encode(), kind


@dataclass
class Bench:
    """A place to judge in: a run with a gateway, and a group of finished rollouts."""

    gateway: Running
    server: JudgeServer
    folder: Path
    notes: list[str] = field(default_factory=list)

    def connect(self, judge: Any) -> Any:
        """Give a judge the run, as a process that starts."""
        models = {
            n: OtherModelSettings(model="openai/x") for n in self.gateway.deps.provider_models
        }
        judge.connect(
            ScoringContext(
                self.gateway.store, self.gateway.run_id, self.folder, self.notes.append,
                models, self.gateway.url, OPERATOR_KEY, ["base", "policy"],
            )
        )  # fmt: skip
        return judge

    def group(self, *answers: str, asked: str = "Name a color.") -> list[Trace]:
        """Finished rollouts, as they would be read, with these answers."""
        claims = self.gateway.new_claims(len(answers))
        for claim in claims:
            self.gateway.store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
        found = self.gateway.store.rollouts(
            self.gateway.run_id, ids=[claim.rollout_id for claim in claims]
        )
        empty = read_traces(self.gateway.store, found)
        question = [{"role": "user", "content": asked}]
        for trace, answer in zip(empty, answers, strict=True):
            trace.messages.extend([*question, {"role": "assistant", "content": answer}])
        return empty

    def noted(self, trace: Trace, judge: Any) -> list[Any]:
        """What the judge has left in the trace of a rollout."""
        store = self.gateway.store
        spans = [s for s in store.spans(trace.rollout_id) if s.attempt_id == trace.attempt_id]
        name, data = "agentrl.note.name", "agentrl.note.data"
        mine = [s for s in spans if s.attributes[name] == f"judge.{judge.name}"]
        return [json.loads(span.attributes[data]) for span in mine]


def judged(judge: Any, traces: Sequence[Trace]) -> list[float | None]:
    return asyncio.run(judge(traces))


def scoring(points: dict[str, Any]) -> Says:
    """Scores conversations by their last message, and says why."""

    def say(data: Any) -> Any:
        return {
            number: {"explanation": f"it says {messages[-1]['content']}", "score": points[
                messages[-1]["content"]
            ]}
            for number, messages in data["conversations"].items()
        }  # fmt: skip

    return say
