"""A rollout as a tree for the terminal: attempts, their spans, calls, rewards, output and errors.

Knows the store's records and rich. Everything that was recorded has a place in the tree: a call
whose span never arrived hangs under its attempt, as does a span whose parent is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from agentrl_tracer.conventions import OUTPUT, REWARD_SPAN
from agentrl_tracer.schemas import (
    Attempt,
    AttemptState,
    Call,
    CallState,
    Reward,
    Rollout,
    Span,
)
from agentrl_tracer.store import Store

_EXCERPT = 240  # characters of a prompt or an answer
_LOG_LINES = 20
_STATE_STYLE = {"succeeded": "green", "running": "cyan", "queued": "cyan"}
_SHOWN_ATTRIBUTES = (
    "gen_ai.agent.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    OUTPUT,
)


def rollout_tree(store: Store, rollout: Rollout) -> Tree:
    """Everything that is recorded of one rollout."""
    attempts = store.attempts([rollout.id])
    spans = store.spans(rollout.id)
    calls = store.calls(rollout_ids=[rollout.id])
    rewards = store.rewards([rollout.id])
    head = Text("rollout ", "bold")
    head.append(rollout.id)
    head.append(f"  {rollout.state}", _STATE_STYLE.get(rollout.state, "red"))
    if rollout.reason and not any(attempt.error for attempt in attempts):
        head.append(f"  {_excerpt(rollout.reason)}", "red")
    tree = Tree(head, guide_style="dim")
    for attempt in attempts:
        mine = [call for call in calls if call.attempt_id == attempt.id]
        _add_attempt(
            tree,
            attempt,
            [span for span in spans if span.attempt_id == attempt.id],
            mine,
            [reward for reward in rewards if reward.attempt_id == attempt.id],
            won=attempt.id == rollout.winner,
        )
    return tree


def _add_attempt(
    tree: Tree,
    attempt: Attempt,
    spans: Sequence[Span],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    *,
    won: bool,
) -> None:
    head = Text(f"attempt {attempt.number}", "bold")
    head.append(f"  {attempt.state}", _STATE_STYLE.get(attempt.state, "red"))
    if attempt.ended_at is not None:
        head.append(f"  {_seconds(attempt.ended_at - attempt.started_at)}", "dim")
    if calls:
        read = sum(len(call.prompt_ids) for call in calls if call.choice == 0)
        sampled = sum(len(call.response_ids) for call in calls)
        head.append(f"  {len(calls)} calls, {read} + {sampled} tokens", "dim")
    if rewards:
        head.append(f"  reward {sum(r.value for r in rewards):+g}", "green" if won else "dim")
    elif attempt.state is AttemptState.SUCCEEDED:
        head.append("  no reward", "yellow")
    branch = tree.add(head)
    _Spans(spans, calls, rewards).add_to(branch)
    output = _read_log(attempt.log)
    if attempt.error and attempt.error not in output:  # else its output ends with it
        branch.add(Text("error", "bold red")).add(Text(attempt.error, "red"))
    _add_log(branch, attempt.log, output)


class _Spans:
    """An attempt's spans as a tree, with each call and reward below the span that made it."""

    def __init__(
        self, spans: Sequence[Span], calls: Sequence[Call], rewards: Sequence[Reward]
    ) -> None:
        # A reward's own span says nothing that the reward does not.
        shown = [span for span in spans if span.name != REWARD_SPAN]
        known = {span.span_id for span in shown}
        by_response = {
            str(span.attributes["gen_ai.response.id"]): span.span_id
            for span in shown
            if "gen_ai.response.id" in span.attributes
        }
        root = next((span.span_id for span in shown if span.parent_span_id is None), None)
        self._children: dict[str | None, list[tuple[float, Span | Call | Reward]]] = {}
        for span in shown:
            parent = span.parent_span_id if span.parent_span_id in known else None
            self._put(parent, span.start_ns / 1e9, span)
        for call in calls:
            # The client's id first: a framework's span may have several calls below it.
            parent = by_response.get(call.response_id)
            if parent is None:
                parent = call.span_id if call.span_id in known else root
            self._put(parent, call.started_at, call)
        for reward in rewards:
            parent = reward.span_id if reward.span_id in known else root
            self._put(parent, reward.created_at, reward)

    def _put(self, parent: str | None, at: float, item: Span | Call | Reward) -> None:
        self._children.setdefault(parent, []).append((at, item))

    def add_to(self, branch: Tree, parent: str | None = None) -> None:
        for _, item in sorted(self._children.get(parent, []), key=lambda pair: pair[0]):
            match item:
                case Span():
                    self.add_to(branch.add(_span_line(item)), item.span_id)
                case Call():
                    _add_call(branch, item)
                case Reward():
                    branch.add(_reward_line(item))


def _span_line(span: Span) -> Text:
    line = Text(span.name, "cyan")
    line.append(f"  {_seconds((span.end_ns - span.start_ns) / 1e9)}", "dim")
    for name in _SHOWN_ATTRIBUTES:
        if name in span.attributes:
            label = name.removeprefix("gen_ai.").removeprefix("agentrl.")
            line.append(f"  {label}=", "dim")
            line.append(_excerpt(_text_of(span.attributes[name])))
    if span.status == "error":
        line.append("  error", "bold red")
    for event in span.events:
        if event.get("name") == "exception":
            told = event.get("attributes", {})
            what = f"{told.get('exception.type', '')}: {told.get('exception.message', '')}"
            line.append(f"  {_excerpt(what)}", "red")
    return line


def _add_call(branch: Tree, call: Call) -> None:
    line = Text("call ", "bold magenta")
    line.append(call.model, "magenta")
    if call.adapter is not None:
        line.append(f" = {call.adapter}@{call.adapter_version}", "magenta")
    if call.agent:
        line.append(f"  by {call.agent}")
    line.append(f"  {len(call.prompt_ids)} + {len(call.response_ids)} tokens", "dim")
    if call.ended_at is not None:
        line.append(f"  {_seconds(call.ended_at - call.started_at)}", "dim")
    if call.finish_reason:
        line.append(f"  {call.finish_reason}", "dim")
    if call.state is not CallState.COMPLETED:
        line.append(f"  {call.state}", "red")
    if call.trained_step is not None:
        line.append(f"  trained in step {call.trained_step}", "green")
    elif call.skip_reason is not None:
        line.append(f"  skipped: {call.skip_reason}", "yellow")
    below = branch.add(line)
    below.add(_labelled("asked ", prompt_excerpt(call.request)))
    if call.response is not None:
        below.add(_labelled("answer", answer_excerpt(call.response)))
    if call.error:
        below.add(Text(_excerpt(call.error), "red"))


def _reward_line(reward: Reward) -> Text:
    line = Text(f"reward {reward.value:+g}", "bold green")
    if reward.name != "reward":
        line.append(f"  {reward.name}")
    if reward.explanation:
        line.append(f"  {_excerpt(reward.explanation)}", "dim")
    return line


def _read_log(log: str | None) -> str:
    if log is None:
        return ""
    try:
        return Path(log).read_text(errors="replace")
    except OSError as error:  # of another machine's runner, or deleted
        return f"not here: {error.strerror}"


def _add_log(branch: Tree, log: str | None, output: str) -> None:
    if log is None:
        return
    lines = output.splitlines()
    head = Text("output", "bold")
    head.append(f"  {log}", "dim")
    if len(lines) > _LOG_LINES:
        head.append(f"  the last {_LOG_LINES} of {len(lines)} lines", "dim")
    branch.add(head).add(Text("\n".join(lines[-_LOG_LINES:])))


def prompt_excerpt(request: Mapping[str, Any] | None) -> str:
    """The last thing that a request says, in whichever protocol: ``user: Who are you?``."""
    request = request or {}
    said: Any = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if not isinstance(said, list) or not said:
        return _excerpt(_text_of(said))
    last = said[-1]
    if not isinstance(last, dict):
        return _excerpt(_text_of(last))
    more = f"({len(said) - 1} before)  " if len(said) > 1 else ""
    role = str(last.get("role") or last.get("type") or "?")
    return _excerpt(f"{more}{role}: {_text_of(last.get('content') or last.get('output') or '')}")


def answer_excerpt(response: Mapping[str, Any]) -> str:
    """What a response says, tool calls included, in whichever protocol."""
    for choice in response.get("choices") or []:
        if "text" in choice:
            return _excerpt(str(choice["text"]))
        message = choice.get("message") or {}
        parts = [_text_of(message.get("content") or "")]
        for tool in message.get("tool_calls") or []:
            function = tool.get("function") or {}
            parts.append(f"→ {function.get('name')}({function.get('arguments')})")
        return _excerpt("  ".join(filter(None, parts)))
    return _excerpt(_text_of(response.get("output") or response.get("content") or ""))


def _text_of(content: Any) -> str:
    """Content is a string, or a list of parts with text, tool calls or results in them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            parts.append(str(part))
        elif "name" in part:
            arguments = part.get("arguments", part.get("input"))
            parts.append(f"→ {part['name']}({_text_of(arguments)})")
        else:
            inner = part.get("text") or part.get("content") or part.get("refusal")
            parts.append(_text_of(inner) if inner else f"[{part.get('type', 'part')}]")
    return " ".join(parts)


def _labelled(label: str, text: str) -> Text:
    line = Text(f"{label} ", "dim")
    line.append(text)
    return line


def _excerpt(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"


def _seconds(duration: float) -> str:
    return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
