"""A rollout for the terminal: a tree of attempts, spans, calls and rewards; errors and outputs.

``agentrl.history.rollout.trace`` has the tree. Errors and outputs are below it: their lines, which
may be a traceback's, are not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from agentrl.console.output import whole
from agentrl.history.rollout.conversation import answer_excerpt, prompt_excerpt
from agentrl.history.rollout.trace import Node, log_end, read_trace
from agentrl.runs.excerpts import excerpt
from agentrl_tracer.schemas import Attempt, Call, Rollout
from agentrl_tracer.store import Store

_LOG_LINES = 20
_STATE_STYLE = {"completed": "green", "running": "cyan", "queued": "cyan"}
_STYLES = {f"state {name}": style for name, style in _STATE_STYLE.items()} | {
    "attempt": "bold", "span": "cyan", "note": "bold cyan", "call": "bold magenta",
    "reward": "bold green", "earned": "green", "busy": "yellow",
    "fault": "red", "faint": "dim", "": "",
}  # fmt: skip
"""By a node's kind, or by how one of its details looks; other states are red."""


def rollout_trace(store: Store, rollout: Rollout) -> Group:
    """Return everything that is recorded of one rollout, for ``print_block``."""
    trace = read_trace(store, rollout)
    head = Text.assemble(("rollout ", "bold"), rollout.id)
    state = rollout.state.shown
    head.append(f"  {state}", _STATE_STYLE.get(state, "red"))
    if rollout.reason and not any(attempt.error for attempt in trace.attempts):
        head.append(f"  {excerpt(rollout.reason)}", "red")
    tree = Tree(head, guide_style="dim")
    for root in trace.roots:
        branches = [tree]  # to the node that is being drawn
        for depth, node in root.walk():
            branches[depth + 1 :] = [branches[depth].add(_line(node))]
            for line in _below(node):
                branches[-1].add(line)
    return Group(tree, *(line for attempt in trace.attempts for line in _output(attempt)))


def _line(node: Node) -> Text:
    line = Text.assemble((node.title, _STYLES[node.kind]))
    for text, look in node.details:
        line.append(f"  {text}", _STYLES.get(look, "red"))
    if node.seconds is not None:
        digits = 2 if node.seconds < 10 else 0
        line.append(f"  {node.seconds:.{digits}f} s", "dim")
    return line


def _below(node: Node) -> Iterator[Text]:
    """Yield what a call asked and answered, a line each."""
    call = node.record
    if isinstance(call, Call):
        yield Text.assemble(("asked  ", "dim"), prompt_excerpt(call.request))
        if call.response is not None:
            yield Text.assemble(("answer ", "dim"), answer_excerpt(call.response))
        if call.error:
            yield Text(excerpt(call.error), "red")


def _output(attempt: Attempt) -> Iterator[Text]:
    """Yield the error, unless the output ends with it, and the end of the output."""
    of, lines = f"of attempt {attempt.number}", list[str]()
    if attempt.log is not None:
        try:
            lines, _ = log_end(Path(attempt.log))
        except OSError as error:  # of another machine's runner, or deleted
            lines = [f"not here: {error.strerror}"]
    if attempt.error and attempt.error not in "\n".join(lines):
        yield whole((f"error {of}\n", "bold red"), (attempt.error, "red"))
    if attempt.log is not None:
        cut = f", the last {_LOG_LINES} lines" if len(lines) > _LOG_LINES else ""
        ends = [f"\n{line}" for line in lines[-_LOG_LINES:]]
        yield whole((f"output {of}{cut}", "bold"), (f"  {attempt.log}", "dim"), *ends)
