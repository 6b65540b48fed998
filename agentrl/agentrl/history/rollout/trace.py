"""A rollout's records as a tree: attempts, spans, calls and rewards, each below what made it.

Everything that was recorded has a place: a call whose span never arrived hangs under its attempt,
as does a span whose parent is unknown. The terminal and the pages draw this tree.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from agentrl.runs.excerpts import counted, excerpt, text_of
from agentrl_tracer.conventions import ASIDE, NOTE_DATA, NOTE_NAME, NOTE_SPAN, OUTPUT, REWARD_SPAN
from agentrl_tracer.schemas import Attempt, AttemptState, Call, CallState, Reward, Rollout, Span
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import winning_rewards

Record = Attempt | Span | Call | Reward
_SHOWN_ATTRIBUTES = (
    "gen_ai.agent.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    OUTPUT,
)
_LOG_BYTES = 64_000


@dataclass
class Node:
    """A record in one line, and what happened below it in order of time.

    ``details`` are texts, each with how it looks: a class of the pages, for which the terminal has
    a style. Agents' texts become excerpts. Times are seconds since the epoch.
    """

    record: Record
    kind: str
    """``attempt``, ``span``, ``note``, ``call`` or ``reward``."""
    title: str
    details: list[tuple[str, str]]
    start: float
    end: float | None
    children: list[Node] = field(default_factory=list["Node"])

    def __post_init__(self) -> None:
        self.title = excerpt(self.title)
        self.details = [(excerpt(text), look) for text, look in self.details if text]

    @property
    def seconds(self) -> float | None:
        """How long it took; None for what is not over, or takes no time."""
        if self.end is None or self.kind in ("note", "reward"):
            return None
        return self.end - self.start

    def walk(self) -> Iterator[tuple[int, Node]]:
        """Yield this node and all below it with their depths, top-down."""
        waiting = [(0, self)]  # no recursion: agents can nest spans without limit
        while waiting:
            depth, node = waiting.pop()
            yield depth, node
            waiting += [(depth + 1, child) for child in reversed(node.children)]


@dataclass(frozen=True)
class Trace:
    """A rollout's attempts in order, each with the root of its tree; calls and rewards of all."""

    attempts: list[Attempt]
    roots: list[Node]
    calls: list[Call]
    rewards: list[Reward]


def read_trace(store: Store, rollout: Rollout, *, bodies: bool = True) -> Trace:
    """Read all that is recorded of a rollout.

    Args:
        bodies: False leaves the calls' requests and responses out (None).
    """
    attempts = store.attempts([rollout.id])
    spans, rewards = store.spans(rollout.id), store.rewards([rollout.id])
    calls = store.calls(rollout_ids=[rollout.id], bodies=bodies)
    roots: list[Node] = []
    ordered: list[Call] = []
    for attempt in attempts:
        made = [span for span in spans if span.attempt_id == attempt.id]
        mine = [call for call in calls if call.attempt_id == attempt.id]
        earned = [reward for reward in rewards if reward.attempt_id == attempt.id]
        roots.append(_attempt_node(attempt, mine, earned))
        _add_records(roots[-1], made, mine, earned)
        ordered += mine
    return Trace(attempts, roots, ordered, rewards)


def count_tokens(calls: Sequence[Call]) -> tuple[int, int]:
    """Count prompt and sampled tokens; choices that were sampled together share the prompt."""
    counts = [(call.choice, *(call.tokens or (0, 0))) for call in calls]
    read = sum(prompt for choice, prompt, _ in counts if choice == 0)
    return read, sum(sampled for _, _, sampled in counts)


def earned_by_name(
    rollout: Rollout, rewards: Sequence[Reward], *, aside: bool = True
) -> dict[str, float]:
    """Sum the rewards of the winning attempt by their names; ``aside`` as for ``winning_rewards``.

    The rewards of one agent are named ``AGENT:NAME``.
    """
    sums: dict[str, float] = {}
    for reward in winning_rewards(rollout, rewards, aside=aside):
        name = f"{reward.agent}:{reward.name}" if reward.agent else reward.name
        sums[name] = sums.get(name, 0.0) + reward.value
    return sums


def verdict_of(call: Call) -> str | None:
    """Return where a call went: ``trained in step 3``, ``skipped: evaluation``."""
    if call.trained_step is not None:
        return f"trained in step {call.trained_step}"
    return None if call.skip_reason is None else f"skipped: {call.skip_reason}"


def longest_calls(store: Store, run_id: str, rollout_ids: Sequence[str]) -> list[Call | None]:
    """Return the longest call of each rollout, of the attempt that won or else the last one."""
    attempts = {attempt.rollout_id: attempt.id for attempt in store.attempts(rollout_ids)}
    rollouts = store.rollouts(run_id, ids=rollout_ids)
    attempts |= {one.id: one.winner for one in rollouts if one.winner}
    calls = {call.rollout_id: call for call in store.longest_calls(list(attempts.values()))}
    return [calls.get(one) for one in rollout_ids]


def log_end(path: Path) -> tuple[list[str], int]:
    """Return the last lines of a log of any size, 64 kB at most, and its size in bytes.

    Raises:
        OSError: it is not here.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LOG_BYTES, 0))
        return file.read().decode(errors="replace").splitlines(), size


# ---- the tree


def _add_records(
    attempt: Node, spans: Sequence[Span], calls: Sequence[Call], rewards: Sequence[Reward]
) -> None:
    """Add an attempt's spans, with each call and reward below the span that made it."""
    # A reward's own span says nothing that the reward does not.
    shown = [span for span in spans if span.name != REWARD_SPAN]
    nodes = {span.span_id: _span_node(span) for span in shown}
    by_response = {span.attributes.get("gen_ai.response.id"): span.span_id for span in shown}
    # A judge's note, left after the attempt, has no parent either.
    begins = (span for span in shown if span.parent_span_id is None and span.name != NOTE_SPAN)
    root = next((span.span_id for span in begins), None)
    below: dict[str | None, list[Node]] = defaultdict(list)
    for span in shown:
        parent = span.parent_span_id if span.parent_span_id in nodes else None
        below[parent].append(nodes[span.span_id])
    for call in calls:
        # The client's id first: a framework's span may have several calls below it.
        parent = by_response.get(call.response_id, call.span_id)
        below[parent if parent in nodes else root].append(_call_node(call))
    for reward in rewards:
        below[reward.span_id if reward.span_id in nodes else root].append(_reward_node(reward))
    for parent, children in below.items():
        node = attempt if parent is None else nodes[parent]
        node.children = sorted(children, key=attrgetter("start"))


def _attempt_node(attempt: Attempt, calls: Sequence[Call], rewards: Sequence[Reward]) -> Node:
    unpaid = "no reward" if attempt.state is AttemptState.SUCCEEDED else ""
    values = [one.value for one in rewards if not one.key.startswith(ASIDE)]
    earned = _earned(sum(values)) if values else ""
    read, sampled = count_tokens(calls)
    details = [
        (attempt.state.shown, f"state {attempt.state.shown}"),
        (f"{counted(len(calls), 'call')}, {read:,} + {sampled:,} tokens" if calls else "", "faint"),
        (earned or unpaid, "earned" if earned else "busy"),
        (f"by {attempt.runner}", "faint"),
    ]
    title, start, end = f"attempt {attempt.number}", attempt.started_at, attempt.ended_at
    return Node(attempt, "attempt", title, details, start, end)


def _span_node(span: Span) -> Node:
    said, kind, title = span.attributes, "span", span.name
    shown = [(name, said[name]) for name in _SHOWN_ATTRIBUTES if name in said]
    details = [(f"{name.partition('.')[2]}={text_of(value)}", "") for name, value in shown]
    if span.name == NOTE_SPAN:
        kind, title = "note", f"note {text_of(said.get(NOTE_NAME, ''))}"
        details = [(text_of(said.get(NOTE_DATA, "")), "")]
    if span.status == "error":
        details.append(("error", "fault"))
    for event in span.events:
        if event.get("name") == "exception":
            what = event.get("attributes", {})
            why = f"{what.get('exception.type', '')}: {what.get('exception.message', '')}"
            details.append((why, "fault"))
    return Node(span, kind, title, details, span.start_ns / 1e9, span.end_ns / 1e9)


def _call_node(call: Call) -> Node:
    answered_by = f" = {call.adapter}@{call.adapter_version}" if call.adapter else ""
    tokens = "{:,} + {:,} tokens".format(*call.tokens) if call.tokens else "tokens not reported"
    details = [
        (f"by {call.agent}" if call.agent else "", ""),
        (tokens, "faint"),
        (call.finish_reason or "", "faint"),
        (str(call.state) if call.state is not CallState.COMPLETED else "", "fault"),
        (verdict_of(call) or "", "busy" if call.skip_reason else "earned"),
    ]
    return Node(
        call, "call", f"call {call.model}{answered_by}", details, call.started_at, call.ended_at
    )


def _reward_node(reward: Reward) -> Node:
    name = "" if reward.name == "reward" else reward.name
    whose = f"for {reward.agent}" if reward.agent else ""
    aside = "set aside" if reward.key.startswith(ASIDE) else ""
    details = [(name, ""), (whose, ""), (aside, "faint"), (reward.explanation or "", "faint")]
    at = reward.created_at
    return Node(reward, "reward", _earned(reward.value), details, at, at)


def _earned(value: float) -> str:
    return f"reward {value:+g}" if math.isfinite(value) else "reward refused"
