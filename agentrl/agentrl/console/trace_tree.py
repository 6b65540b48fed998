"""A rollout for the terminal: a tree of attempts, spans, calls and rewards; errors and outputs.

``agentrl.history.trace`` builds the tree. Errors and outputs are below it: their lines, which may
be a traceback's, are not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from agentrl.console.output import whole
from agentrl.history.trace import (
    AttemptTrace,
    Node,
    Record,
    attempt_traces,
    attributes_of,
    exceptions_of,
    note_of,
    verdict_of,
)
from agentrl.runs.excerpts import answer_excerpt, excerpt, prompt_excerpt
from agentrl_tracer.schemas import Attempt, AttemptState, Call, CallState, Reward, Rollout, Span
from agentrl_tracer.store import Store

_LOG_LINES = 20
_STATE_STYLE = {"succeeded": "green", "running": "cyan", "queued": "cyan"}


def rollout_trace(store: Store, rollout: Rollout) -> Group:
    """Return everything that is recorded of one rollout, for ``print_block``."""
    traces = attempt_traces(store, rollout)
    told = any(trace.attempt.error for trace in traces)
    head = _line(
        ("rollout ", "bold"),
        (rollout.id, ""),
        (f"  {rollout.state}", _STATE_STYLE.get(rollout.state, "red")),
        (f"  {excerpt(rollout.reason)}", "red") if rollout.reason and not told else None,
    )
    tree = Tree(head, guide_style="dim")
    for trace in traces:
        won = trace.attempt.id == rollout.winner
        _draw(tree.add(_attempt_line(trace, won=won)), trace.tree)
    return Group(tree, *(line for trace in traces for line in _output(trace.attempt)))


def _line(*parts: tuple[str, str] | None) -> Text:
    """Join texts with their styles; None is left out."""
    return Text.assemble(*filter(None, parts))


def _seconds(start: float, end: float | None) -> tuple[str, str] | None:
    return None if end is None else (f"  {end - start:.{2 if end - start < 10 else 0}f} s", "dim")


def _attempt_line(trace: AttemptTrace, *, won: bool) -> Text:
    attempt, calls, rewards = trace.attempt, trace.calls, trace.rewards
    read, sampled = trace.tokens
    earned = None
    if rewards:
        earned = f"  reward {sum(r.value for r in rewards):+g}", "green" if won else "dim"
    elif attempt.state is AttemptState.SUCCEEDED:
        earned = "  no reward", "yellow"
    return _line(
        (f"attempt {attempt.number}", "bold"),
        (f"  {attempt.state}", _STATE_STYLE.get(attempt.state, "red")),
        _seconds(attempt.started_at, attempt.ended_at),
        (f"  {len(calls)} calls, {read} + {sampled} tokens", "dim") if calls else None,
        earned,
    )


def _draw(under: Tree, node: Node) -> None:
    for child in node.children:
        head, *lines = _lines(child.record)
        below = under.add(head)
        for line in lines:
            below.add(line)
        _draw(below, child)


def _lines(record: Record) -> list[Text]:
    match record:
        case Span():
            return [_span_line(record)]
        case Call():
            return _call_lines(record)
        case Reward():
            return [_reward_line(record)]
        case Attempt():
            raise TypeError("an attempt is a root")


def _span_line(span: Span) -> Text:
    if note := note_of(span):
        return _line(("note ", "bold cyan"), (note[0], "cyan"), (f"  {note[1]}", ""))
    line = _line((span.name, "cyan"), _seconds(span.start_ns / 1e9, span.end_ns / 1e9))
    for name, value in attributes_of(span):
        line.append(f"  {name}=", "dim")
        line.append(value)
    if span.status == "error":
        line.append("  error", "bold red")
    for what in exceptions_of(span):
        line.append(f"  {what}", "red")
    return line


def _tokens(call: Call) -> str:
    return "tokens not reported" if call.tokens is None else "{} + {} tokens".format(*call.tokens)


def _call_lines(call: Call) -> list[Text]:
    verdict = verdict_of(call)
    head = _line(
        ("call ", "bold magenta"),
        (call.model, "magenta"),
        (f" = {call.adapter}@{call.adapter_version}", "magenta") if call.adapter else None,
        (f"  by {call.agent}", "") if call.agent else None,
        (f"  {_tokens(call)}", "dim"),
        _seconds(call.started_at, call.ended_at),
        (f"  {call.finish_reason}", "dim") if call.finish_reason else None,
        (f"  {call.state}", "red") if call.state is not CallState.COMPLETED else None,
        (f"  {verdict}", "yellow" if call.skip_reason else "green") if verdict else None,
    )
    lines = [head, _line(("asked  ", "dim"), (prompt_excerpt(call.request), ""))]
    if call.response is not None:
        lines.append(_line(("answer ", "dim"), (answer_excerpt(call.response), "")))
    return [*lines, Text(excerpt(call.error), "red")] if call.error else lines


def _reward_line(reward: Reward) -> Text:
    return _line(
        (f"reward {reward.value:+g}", "bold green"),
        (f"  {reward.name}", "") if reward.name != "reward" else None,
        (f"  {excerpt(reward.explanation)}", "dim") if reward.explanation else None,
    )


def _output(attempt: Attempt) -> Iterator[Text]:
    """Return the error, unless the output ends with it, and the end of the output."""
    output, log, of = "", attempt.log, f"of attempt {attempt.number}"
    if log is not None:
        try:
            output = Path(log).read_text(errors="replace")
        except OSError as error:  # of another machine's runner, or deleted
            output = f"not here: {error.strerror}"
    if attempt.error and attempt.error not in output:
        yield whole((f"error {of}\n", "bold red"), (attempt.error, "red"))
    if log is not None:
        lines = output.splitlines()
        cut = f", the last {_LOG_LINES} of {len(lines)} lines" if len(lines) > _LOG_LINES else ""
        ends = [f"\n{line}" for line in lines[-_LOG_LINES:]]
        yield whole((f"output {of}{cut}", "bold"), (f"  {log}", "dim"), *ends)
