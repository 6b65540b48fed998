"""A rollout as a tree: everything that was recorded has a place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from store_records import call_of, claimed, enqueue, record_spans

from agentrl.console.output import print_block
from agentrl.console.trace_tree import rollout_trace
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME, NOTE_SPAN
from agentrl_tracer.schemas import AttemptState, CallState, Policies, Reward, Rollout, Span
from agentrl_tracer.store import Store


def printed(store: Store, rollout: Rollout, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        print_block(rollout_trace(store, rollout), console)
    return capture.get()


def test_everything_recorded_has_a_place(tmp_path: Path) -> None:
    """Spans with unknown parents, calls without spans, retries: all are in the tree, once."""
    store, log = Store(str(tmp_path / "store.db")), tmp_path / "log"
    run_id = store.create_run("r", "train", {}, Policies(on_error="retry", on_missing_reward=-1.0))
    enqueue(store, run_id, {})
    frame = f'  File "{"/a-long-folder" * 8}/agent.py", line 3, in agent'
    log.write_text("\n".join([*(f"line {i}" for i in range(49)), frame, "line 49"]))
    store.end_attempt(
        claimed(store).attempt_id, AttemptState.ERROR, error=f"boom\n{frame}!", log=str(log)
    )
    second = claimed(store)

    def span(name: str, span_id: str, parent: str | None, **attributes: Any) -> Span:
        return Span(
            "t", span_id, parent, name, "internal", 1, 2, "unset", attributes, [], {},
            second.rollout_id, second.attempt_id,
        )  # fmt: skip

    spans = [
        span("root-span", "s1", None),
        span("lost-parent", "s2", "nowhere"),
        span("chat-span", "s3", "s1", **{"gen_ai.response.id": "c2"}),
        span(NOTE_SPAN, "s4", "s1", **{NOTE_NAME: "verdict", NOTE_DATA: '{"ok": true}'}),
    ]
    earned = Reward(second.attempt_id, second.rollout_id, "turn", 0.25, key="k", span_id="s3")
    record_spans(store, spans, [earned])
    cancelled = CallState.CANCELLED
    calls = [
        call_of(second, name, agent="player", request={"prompt": f"prompt-{name}"}, **of)
        for name, of in {
            "c1": {"span_id": "s1"}, "c2": {"span_id": "s1"}, "c3": {"state": cancelled}
        }.items()
    ]  # fmt: skip
    store.write_calls("boot", [], calls, 3)
    store.end_attempt(second.attempt_id, AttemptState.SUCCEEDED)
    [rollout] = store.rollouts(run_id)
    shown, narrow = (printed(store, rollout, width) for width in (200, 80))
    store.close()
    lines = [(line.strip("│ ├└─"), len(line) - len(line.lstrip("│ ├└─")))
             for line in shown.splitlines()]  # fmt: skip

    def depth(start: str) -> int:
        [found] = [at for line, at in lines if line.startswith(start)]
        return found

    assert depth("lost-parent") == depth("root-span")
    assert depth("asked  user: prompt-c2") == depth("asked  user: prompt-c1") + 4  # in chat-span
    assert depth("reward +0.25  turn") == depth("chat-span") + 4
    assert depth('note verdict  {"ok": true}') == depth("chat-span")
    assert depth("attempt 1") == depth("attempt 2")
    assert "cancelled" in shown
    assert shown.count("by player") == 3
    assert {"boom", frame, f"{frame}!"} < {*narrow.splitlines()}  # tracebacks are not wrapped
    assert f"output of attempt 1, the last 20 lines  {log}" in narrow
    assert "line 49" in shown
    assert "line 29" not in shown
