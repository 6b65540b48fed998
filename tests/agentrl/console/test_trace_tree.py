"""A rollout as a tree: everything that was recorded has a place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from store_records import record_spans

from agentrl.console.output import print_block
from agentrl.console.trace_tree import rollout_trace
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN
from agentrl_tracer.schemas import (
    AttemptState,
    Call,
    CallState,
    NewRollout,
    Policies,
    Purpose,
    Reward,
    Span,
)
from agentrl_tracer.store import Store


def printed(what: Any, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        print_block(what, console)
    return capture.get()


def test_everything_recorded_has_a_place(tmp_path: Path) -> None:
    """Spans with unknown parents, calls without spans, retries: all are in the tree, once."""
    store = Store(str(tmp_path / "store.db"))
    run_id = store.create_run("r", "train", {}, Policies(on_error="retry", on_missing_reward=-1.0))
    [task] = store.add_tasks(run_id, "train", [{}])
    [rollout_id] = store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, 0, 0)])
    first = store.claim("runner", 60, run_id)
    assert first is not None
    frame = f'  File "{"/a-long-folder" * 8}/agent.py", line 3, in agent'
    (tmp_path / "log").write_text("\n".join([*(f"line {i}" for i in range(49)), frame, "line 49"]))
    store.end_attempt(
        first.attempt_id, AttemptState.ERROR, error=f"boom\n{frame}!", log=str(tmp_path / "log")
    )
    second = store.claim("runner", 60, run_id)
    assert second is not None

    def span(name: str, span_id: str, parent: str | None, **attributes: Any) -> Span:
        return Span(
            "t", span_id, parent, name, "internal", 1, 2, "unset", attributes, [], {},
            rollout_id, second.attempt_id,
        )  # fmt: skip

    record_spans(
        store,
        [
            span("root-span", "s1", None),
            span("lost-parent", "s2", "nowhere"),
            span("chat-span", "s3", "s1", **{"gen_ai.response.id": "c2"}),
            span(NOTE_SPAN, "s4", "s1", **{NOTE_NAME: "verdict", NOTE_DATA: '{"ok": true}'}),
        ],
        [Reward(second.attempt_id, rollout_id, "turn", 0.25, key="k", span_id="s3")],
    )

    def call(name: str, span_id: str | None, state: CallState = CallState.COMPLETED) -> Call:
        return Call(
            name, name, 0, run_id, rollout_id, second.attempt_id, 0, "player", "policy", "policy",
            3, state, [1], [2], [-0.5], "stop", {}, {"prompt": f"prompt-{name}"}, None, None, "t",
            span_id, 1.0, 2.0,
        )  # fmt: skip

    calls = [call("c1", "s1"), call("c2", "s1"), call("c3", None, CallState.CANCELLED)]
    store.write_calls("boot", [], calls, 3)
    store.end_attempt(second.attempt_id, AttemptState.SUCCEEDED)
    [rollout] = store.rollouts(run_id)
    shown, narrow = (printed(rollout_trace(store, rollout), width) for width in (200, 80))
    store.close()
    lines = {line.strip("│ ├└─"): len(line) - len(line.lstrip("│ ├└─")) for line in
             shown.splitlines()}  # fmt: skip

    assert 'note verdict  {"ok": true}' in shown

    def depth(start: str) -> int:
        [found] = [at for line, at in lines.items() if line.startswith(start)]
        return found

    assert depth("lost-parent") == depth("root-span")
    assert depth("asked  prompt-c2") == depth("asked  prompt-c1") + 4  # below chat-span
    assert depth("reward +0.25  turn") == depth("chat-span") + 4
    assert "cancelled" in shown
    assert "attempt 1  error" in shown
    assert "boom" in shown
    assert {frame, f"{frame}!"} < {*narrow.splitlines()}  # tracebacks are not wrapped
    assert f"output of attempt 1, the last 20 lines  {tmp_path / 'log'}" in narrow
    assert "line 49" in shown
    assert "line 29" not in shown
    assert shown.count("by player") == 3
