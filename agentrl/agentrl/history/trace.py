"""A rollout's records as a tree: attempts, spans, calls and rewards, each below what made it.

Everything that was recorded has a place: a call whose span never arrived hangs under its attempt,
as does a span whose parent is unknown. The terminal and the pages draw this tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from agentrl.runs.excerpts import excerpt, text_of
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN, OUTPUT, REWARD_SPAN
from agentrl_tracer.schemas import Attempt, Call, Reward, Rollout, Span
from agentrl_tracer.store import Store

Record = Attempt | Span | Call | Reward
_SHOWN_ATTRIBUTES = (
    "gen_ai.agent.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    OUTPUT,
)


@dataclass
class Node:
    """A record, and what happened below it in order of time. Times are seconds since the epoch."""

    record: Record
    start: float
    end: float | None
    children: list[Node] = field(default_factory=list["Node"])

    def walk(self) -> Iterator[tuple[int, Node]]:
        """Yield this node and all below it with their depths, top-down."""
        waiting = [(0, self)]  # no recursion: agents can nest spans without limit
        while waiting:
            depth, node = waiting.pop()
            yield depth, node
            waiting += [(depth + 1, child) for child in reversed(node.children)]


@dataclass(frozen=True)
class AttemptTrace:
    """One attempt: its tree, its calls in order of acceptance and its rewards."""

    attempt: Attempt
    tree: Node
    calls: list[Call]
    rewards: list[Reward]

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and sampled tokens; choices that were sampled together share the prompt."""
        counts = [(call.choice, *(call.tokens or (0, 0))) for call in self.calls]
        read = sum(prompt for choice, prompt, _ in counts if choice == 0)
        return read, sum(sampled for _, _, sampled in counts)


def attempt_traces(store: Store, rollout: Rollout, *, bodies: bool = True) -> list[AttemptTrace]:
    """Return the attempts of a rollout in order.

    Args:
        bodies: False leaves the calls' requests and responses out (None).
    """
    spans, rewards = store.spans(rollout.id), store.rewards([rollout.id])
    calls = store.calls(rollout_ids=[rollout.id], bodies=bodies)
    found: list[AttemptTrace] = []
    for attempt in store.attempts([rollout.id]):
        made = [span for span in spans if span.attempt_id == attempt.id]
        mine = [call for call in calls if call.attempt_id == attempt.id]
        earned = [reward for reward in rewards if reward.attempt_id == attempt.id]
        root = Node(attempt, attempt.started_at, attempt.ended_at)
        _add_records(root, made, mine, earned)
        found.append(AttemptTrace(attempt, root, mine, earned))
    return found


def _add_records(
    attempt: Node, spans: Sequence[Span], calls: Sequence[Call], rewards: Sequence[Reward]
) -> None:
    """Add an attempt's spans, with each call and reward below the span that made it."""
    # A reward's own span says nothing that the reward does not.
    shown = [span for span in spans if span.name != REWARD_SPAN]
    nodes = {span.span_id: Node(span, span.start_ns / 1e9, span.end_ns / 1e9) for span in shown}
    by_response = {span.attributes.get("gen_ai.response.id"): span.span_id for span in shown}
    root = next((span.span_id for span in shown if span.parent_span_id is None), None)
    below: dict[str | None, list[Node]] = defaultdict(list)
    for span in shown:
        parent = span.parent_span_id if span.parent_span_id in nodes else None
        below[parent].append(nodes[span.span_id])
    for call in calls:
        # The client's id first: a framework's span may have several calls below it.
        parent = by_response.get(call.response_id, call.span_id)
        below[parent if parent in nodes else root].append(
            Node(call, call.started_at, call.ended_at)
        )
    for reward in rewards:
        parent = reward.span_id if reward.span_id in nodes else root
        below[parent].append(Node(reward, reward.created_at, reward.created_at))
    for parent, children in below.items():
        node = attempt if parent is None else nodes[parent]
        node.children = sorted(children, key=attrgetter("start"))


def note_of(span: Span) -> tuple[str, str] | None:
    """Return the name and the data of a note, in one line each; None for other spans."""
    if span.name != NOTE_SPAN:
        return None
    name, data = (text_of(span.attributes.get(key, "")) for key in (NOTE_NAME, NOTE_DATA))
    return name, excerpt(data)


def attributes_of(span: Span) -> list[tuple[str, str]]:
    """Return the attributes that say what an agent or a tool did, in one line each."""
    return [
        (name.removeprefix("gen_ai.").removeprefix("agentrl."),
         excerpt(text_of(span.attributes[name])))
        for name in _SHOWN_ATTRIBUTES
        if name in span.attributes
    ]  # fmt: skip


def exceptions_of(span: Span) -> list[str]:
    """Return the exceptions that a span recorded, in one line each."""
    told = [one.get("attributes", {}) for one in span.events if one.get("name") == "exception"]
    return [
        excerpt(f"{one.get('exception.type', '')}: {one.get('exception.message', '')}")
        for one in told
    ]


def verdict_of(call: Call) -> str | None:
    """Return where a call went: ``trained in step 3``, ``skipped: evaluation``."""
    if call.trained_step is not None:
        return f"trained in step {call.trained_step}"
    return None if call.skip_reason is None else f"skipped: {call.skip_reason}"
