"""Ask a judge's model through the run's gateway, and remember its answers.

``judgments.jsonl`` in the run's folder holds every answer with its cost. A resumed run, or the
same judge over recorded rollouts, does not ask for what is in it. The gateway records each call
without a rollout (``no_rollout``), under the judge's name as its agent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx

from agentrl.config.errors import ConfigError
from agentrl.runs.excerpts import json_line
from agentrl_tracer.conventions import AGENT_HEADER, NOTE_DATA, NOTE_NAME, NOTE_SPAN, REQUEST_HEADER
from agentrl_tracer.schemas import Json, Span

if TYPE_CHECKING:
    from agentrl.scoring.functions import ScoringContext
    from agentrl.scoring.trace import Trace

JUDGMENTS = "judgments.jsonl"
_AT_ONCE = 16  # requests
_LONGEST_S = 900.0  # of an answer; a provider's own limits are in the ``models`` table
_TRIES, _PAUSE_S = 3, 1.0  # while the gateway is away or full
_MAY_PASS = (429, 503)
_MAX_TOKENS = 1024  # of our own models' answers, where the judge sets no limit


class UnansweredError(Exception):
    """There is no judgment; the message says why. ``kind`` is the metric that counts it."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """A line of ``judgments.jsonl``."""

    key: str  # digest of the request
    version: int | None  # of the adapter that answered; None: another model
    judge: str
    text: str | None  # None: the model refused
    finish_reason: str | None
    call_id: str
    cost: float  # dollars, by LiteLLM's prices


class Tally:
    """A judge's metrics, its notes to the user, and its notes in the traces."""

    def __init__(self, judge: str, context: ScoringContext) -> None:
        self.judge = judge
        self._context = context
        self._counts = defaultdict[str, float](float)
        self._told: set[str] = set()

    def count(self, what: str, by: float = 1) -> None:
        """Add to the step's metric ``judge/NAME/WHAT``."""
        self._counts[what] += by

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last time."""
        taken, self._counts = self._counts, defaultdict[str, float](float)
        return {f"judge/{self.judge}/{what}": value for what, value in taken.items()}

    def tell(self, kind: str, text: str) -> None:
        """Show the user something that happens again and again, once."""
        if kind not in self._told:
            self._told.add(kind)
            self._context.note(f"judge {self.judge}: {text}")

    def record(self, said: Sequence[tuple[Trace, Json]]) -> None:
        """Leave a note ``judge.NAME`` with each attempt. The same note is kept once."""
        spans = [_note_span(f"judge.{self.judge}", *one) for one in said]
        self._context.store.add_spans(spans)


class Asker:
    """Asks one model for one judge.

    Args:
        max_calls, max_cost: requests and dollars that it may spend in the run, resumes included.
        options: further fields of the requests: temperature, max_tokens.

    Raises:
        ConfigError: the gateway knows no such model.
    """

    def __init__(
        self, context: ScoringContext, tally: Tally, model: str, options: Json,
        *, max_calls: int | None, max_cost: float | None,
    ) -> None:  # fmt: skip
        self._store, self._run_id = context.store, context.run_id
        self._tally, self._model, self._options = tally, model, options
        self._max_calls, self._max_cost = max_calls, max_cost
        self._is_own = model not in context.models  # our sampler answers
        self._url, self._key = context.gateway, context.operator_key
        known = [*context.models, *context.own_models]
        if self._url and model not in known:  # the gateway would ask the policy instead
            raise ConfigError(
                f"judge {tally.judge}: got model {model!r}, which is none of {', '.join(known)}; "
                f"add it as [models.{model}]"
            )
        self._threads = ThreadPoolExecutor(_AT_ONCE, f"judge {tally.judge}")
        self._known: dict[tuple[str, int | None], Answer] = {}
        self._newest: dict[str, Answer] = {}  # by request, whatever version answered
        self._calls, self._dollars = 0, 0.0
        self._path = context.folder / JUDGMENTS
        self._read()

    async def ask(self, messages: Sequence[Json], schema: Json, about: str) -> Answer:
        """Return the model's answer, the recorded one if this was asked before.

        Args:
            schema: of the JSON to answer with.
            about: the id of the group, for the record.

        Raises:
            UnansweredError: the model is down or refuses the request, or the budget is spent.
        """
        body = self._body(messages, schema)
        digest = blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
        key = digest, await asyncio.to_thread(self._version)
        known = self._known.get(key) or (None if self._url else self._newest.get(digest))
        if known is not None:
            self._tally.count("cached")
            return known
        self._spend()
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._send, body, about, *key)
        self._remember(answer)
        self._tally.count("cost", answer.cost)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
        return answer

    def _body(self, messages: Sequence[Json], schema: Json) -> Json:
        named = {"name": "judgment", "strict": True, "schema": schema}
        body: Json = {
            "model": self._model,
            "messages": list(messages),
            "response_format": {"type": "json_schema", "json_schema": named},
        }
        if self._is_own:  # providers may refuse a seed
            text = json.dumps(body["messages"]).encode()
            seed = int.from_bytes(blake2b(text, digest_size=4).digest(), "big") >> 1
            body |= {"seed": seed, "max_tokens": _MAX_TOKENS}
        return body | self._options

    def _version(self) -> int | None:
        """Return the version of an adapter in training: each is a judge of its own."""
        if not self._is_own:
            return None
        latest = self._store.latest_adapters(self._run_id)
        return next((one.version for one in latest if one.name == self._model), None)

    def _spend(self) -> None:
        said = ""
        if self._max_calls is not None and self._calls >= self._max_calls:
            said = f"max_calls = {self._max_calls} is spent"
        elif self._max_cost is not None and self._dollars >= self._max_cost:
            said = f"max_cost = {self._max_cost:g} is spent"
        if said:
            self._tally.tell(said, f"{said}; what it was to judge has no reward")
            raise UnansweredError("over_budget", said)
        self._calls += 1
        self._tally.count("calls")

    # ---- in a thread

    def _send(self, body: Json, about: str, key: str, version: int | None) -> Answer:
        if not self._url:
            raise UnansweredError("down", "it is not among the recorded judgments")
        said = self._answered(body, about)
        choice = next(iter(said["choices"]), {"message": {}, "finish_reason": None})
        message, ended = choice["message"], choice["finish_reason"]
        # LiteLLM moves OpenAI's field there.
        said_no = {**message, **(message.get("provider_specific_fields") or {})}.get("refusal")
        refused = said_no or ended == "content_filter"
        text = None if refused else message.get("content") or ""
        cost = self._cost(said["id"])
        return Answer(key, version, self._tally.judge, text, ended, said["id"], cost)

    def _answered(self, body: Json, about: str) -> Json:
        """Return the gateway's answer, tried again while it is away or full."""
        left = _TRIES
        while True:
            left -= 1
            try:
                return self._post(body, about)
            except httpx.HTTPStatusError as error:
                why = _why_refused(error.response)
                left *= error.response.status_code in _MAY_PASS
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
            if not left:
                self._tally.tell("down", f"no answer: {why}; what it was to judge has no reward")
                raise UnansweredError("down", why)
            time.sleep(_PAUSE_S)

    def _post(self, body: Json, about: str) -> Json:
        headers = {
            "authorization": f"Bearer {self._key}",
            "content-type": "application/json",
            AGENT_HEADER: quote(f"judge.{self._tally.judge}"),
            REQUEST_HEADER: about,
        }
        # The gateway speaks plain HTTP to this machine: certificates would take 20 ms to load.
        with httpx.Client(verify=False, trust_env=False, timeout=_LONGEST_S) as client:
            url, content = f"{self._url}/v1/chat/completions", json.dumps(body).encode()
            return client.post(url, content=content, headers=headers).raise_for_status().json()

    def _cost(self, call_id: str) -> float:
        """Return the dollars of a recorded call."""
        call = self._store.call(call_id)
        params = {} if call is None else call.params
        cost = float(params.get("cost") or 0.0)
        if "usage" in params and not cost:
            self._tally.tell(
                "price",
                f"LiteLLM knows no price of {self._model!r}, so its calls count as 0 dollars; give "
                f"models.{self._model}.params input_cost_per_token and output_cost_per_token",
            )
        return cost

    # ---- answers of earlier processes

    def _read(self) -> None:
        text = self._path.read_text() if self._path.is_file() else ""
        for line in text.splitlines():
            try:
                answer = Answer(**json.loads(line))
            except (ValueError, TypeError):
                continue  # cut off as the run was killed: it is asked again
            if answer.judge == self._tally.judge:
                self._calls += 1
                self._remember(answer)
        if text and not text.endswith("\n"):
            with self._path.open("a") as file:
                file.write("\n")

    def _remember(self, answer: Answer) -> None:
        self._known[answer.key, answer.version] = self._newest[answer.key] = answer
        self._dollars += answer.cost


def _why_refused(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:500]}"


def _note_span(name: str, of: Trace, data: Json) -> Span:
    text, now = json_line(data), time.time_ns()
    said = f"{of.attempt_id} {name} {text}".encode()
    return Span(
        trace_id=blake2b(of.attempt_id.encode(), digest_size=16).hexdigest(),
        span_id=blake2b(said, digest_size=8).hexdigest(),
        parent_span_id=None, name=NOTE_SPAN, kind="internal", start_ns=now, end_ns=now,
        status="unset", attributes={NOTE_NAME: name, NOTE_DATA: text}, events=[], resource={},
        rollout_id=of.rollout_id, attempt_id=of.attempt_id,
    )  # fmt: skip
