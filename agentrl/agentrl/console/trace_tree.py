"""A rollout for the terminal: a tree of attempts, spans, calls and rewards; errors and outputs.

Everything that was recorded has a place: a call whose span never arrived hangs under its attempt,
as does a span whose parent is unknown. Errors and outputs are below the tree: their lines, which
may be a traceback's, are not wrapped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from agentrl.console.output import whole
from agentrl.runs.excerpts import answer_excerpt, excerpt, prompt_excerpt, text_of
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN, OUTPUT, REWARD_SPAN
from agentrl_tracer.schemas import Attempt, AttemptState, Call, CallState, Reward, Rollout, Span
from agentrl_tracer.store import Store

_LOG_LINES = 20
_STATE_STYLE = {"succeeded": "green", "running": "cyan", "queued": "cyan"}
_SHOWN_ATTRIBUTES = (
    "gen_ai.agent.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    OUTPUT,
)


def rollout_trace(store: Store, rollout: Rollout) -> Group:
    """Return everything that is recorded of one rollout, for ``print_block``."""
    attempts, spans = store.attempts([rollout.id]), store.spans(rollout.id)
    calls, rewards = store.calls(rollout_ids=[rollout.id]), store.rewards([rollout.id])
    told = any(attempt.error for attempt in attempts)
    head = _line(
        ("rollout ", "bold"),
        (rollout.id, ""),
        (f"  {rollout.state}", _STATE_STYLE.get(rollout.state, "red")),
        (f"  {excerpt(rollout.reason)}", "red") if rollout.reason and not told else None,
    )
    tree = Tree(head, guide_style="dim")
    for attempt in attempts:
        made = [span for span in spans if span.attempt_id == attempt.id]
        mine = [call for call in calls if call.attempt_id == attempt.id]
        earned = [reward for reward in rewards if reward.attempt_id == attempt.id]
        branch = tree.add(_attempt_line(attempt, mine, earned, won=attempt.id == rollout.winner))
        _add_records(branch, made, mine, earned)
    return Group(tree, *(line for attempt in attempts for line in _output(attempt)))


def _line(*parts: tuple[str, str] | None) -> Text:
    """Join texts with their styles; None is left out."""
    return Text.assemble(*filter(None, parts))


def _seconds(start: float, end: float | None) -> tuple[str, str] | None:
    return None if end is None else (f"  {end - start:.{2 if end - start < 10 else 0}f} s", "dim")


def _attempt_line(
    attempt: Attempt, calls: Sequence[Call], rewards: Sequence[Reward], *, won: bool
) -> Text:
    counts = [(call.choice, *(call.tokens or (0, 0))) for call in calls]
    read = sum(prompt for choice, prompt, _ in counts if choice == 0)
    sampled = sum(response for _, _, response in counts)
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


def _add_records(
    branch: Tree, spans: Sequence[Span], calls: Sequence[Call], rewards: Sequence[Reward]
) -> None:
    """Add an attempt's spans, with each call and reward below the span that made it."""
    # A reward's own span says nothing that the reward does not.
    shown = [span for span in spans if span.name != REWARD_SPAN]
    known = {span.span_id for span in shown}
    by_response = {span.attributes.get("gen_ai.response.id"): span.span_id for span in shown}
    root = next((span.span_id for span in shown if span.parent_span_id is None), None)
    children: dict[str | None, list[tuple[float, str | None, list[Text]]]] = defaultdict(list)
    for span in shown:
        parent = span.parent_span_id if span.parent_span_id in known else None
        children[parent].append((span.start_ns / 1e9, span.span_id, [_span_line(span)]))
    for call in calls:
        # The client's id first: a framework's span may have several calls below it.
        parent = by_response.get(call.response_id, call.span_id)
        children[parent if parent in known else root].append(
            (call.started_at, None, _call_lines(call))
        )
    for reward in rewards:
        parent = reward.span_id if reward.span_id in known else root
        children[parent].append((reward.created_at, None, [_reward_line(reward)]))

    def add_children(under: Tree, parent: str | None) -> None:
        for _, span_id, (head, *lines) in sorted(children[parent], key=itemgetter(0)):
            below = under.add(head)
            for line in lines:
                below.add(line)
            if span_id is not None:
                add_children(below, span_id)

    add_children(branch, None)


def _span_line(span: Span) -> Text:
    if span.name == NOTE_SPAN:
        name, data = (text_of(span.attributes.get(key, "")) for key in (NOTE_NAME, NOTE_DATA))
        return _line(("note ", "bold cyan"), (name, "cyan"), (f"  {excerpt(data)}", ""))
    line = _line((span.name, "cyan"), _seconds(span.start_ns / 1e9, span.end_ns / 1e9))
    for name in _SHOWN_ATTRIBUTES:
        if name in span.attributes:
            line.append(f"  {name.removeprefix('gen_ai.').removeprefix('agentrl.')}=", "dim")
            line.append(excerpt(text_of(span.attributes[name])))
    if span.status == "error":
        line.append("  error", "bold red")
    for event in span.events:
        if event.get("name") == "exception":
            told = event.get("attributes", {})
            what = f"{told.get('exception.type', '')}: {told.get('exception.message', '')}"
            line.append(f"  {excerpt(what)}", "red")
    return line


def _tokens(call: Call) -> str:
    return "tokens not reported" if call.tokens is None else "{} + {} tokens".format(*call.tokens)


def _call_lines(call: Call) -> list[Text]:
    verdict = None
    if call.trained_step is not None:
        verdict = f"  trained in step {call.trained_step}", "green"
    elif call.skip_reason is not None:
        verdict = f"  skipped: {call.skip_reason}", "yellow"
    head = _line(
        ("call ", "bold magenta"),
        (call.model, "magenta"),
        (f" = {call.adapter}@{call.adapter_version}", "magenta") if call.adapter else None,
        (f"  by {call.agent}", "") if call.agent else None,
        (f"  {_tokens(call)}", "dim"),
        _seconds(call.started_at, call.ended_at),
        (f"  {call.finish_reason}", "dim") if call.finish_reason else None,
        (f"  {call.state}", "red") if call.state is not CallState.COMPLETED else None,
        verdict,
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
