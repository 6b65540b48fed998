"""``agentrl run``: one task, and its trace as a tree."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.console.trace_tree import rollout_tree
from agentrl.runs.excerpts import answer_excerpt, prompt_excerpt
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

AGENT = """
import os
from openai import OpenAI
from agentrl import emit_reward

def agent(task):
    client = OpenAI()
    answer = client.chat.completions.create(
        model=os.environ["AGENTRL_MODEL"], messages=[{"role": "user", "content": task["q"]}]
    )
    print("the agent printed this")
    emit_reward({"style": 0.5}, explanation="well put")
    if task.get("fail"):
        raise KeyError("oops")
    return {"said": answer.choices[0].message.content}
"""


def agentrl_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "agents.py").write_text(AGENT)
    return subprocess.run(
        [sys.executable, "-m", "agentrl", "run", "agents.py:agent", *arguments],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip


def test_a_failing_task_shows_its_trace(tmp_path: Path) -> None:
    done = agentrl_run(tmp_path, "--task", '{"q": "Who are you?", "fail": true}')
    assert done.returncode == 1, done.stderr
    shown = " ".join(done.stdout.split())
    for part in (
        "attempt 1 error", "1 calls", "invoke_workflow agent", "call agentrl-tiny",
        "user: Who are you?", "reward +0.5 style well put", "the agent printed this",
        "KeyError: 'oops'",
    ):  # fmt: skip
        assert part in shown, done.stdout
    # The same tree later, from the folder.
    [run] = (tmp_path / "runs").iterdir()
    store = Store(str(run / "store.db"))
    [rollout] = store.rollouts((run / "run_id").read_text())
    store.close()
    again = subprocess.run(
        [sys.executable, "-m", "agentrl", "runs", "show", str(run), "--rollout", rollout.id],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert again.stdout in done.stdout


@pytest.fixture
def openai_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Somebody else's chat completions, and what they were asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body | {"key": self.headers["authorization"], "path": self.path})
            message = {"role": "assistant", "content": "I am elsewhere."}
            answer = {
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
            }  # fmt: skip
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_another_server_may_answer(
    tmp_path: Path,
    openai_server: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, asked = openai_server
    monkeypatch.setenv("THEIR_KEY", "sk-theirs")
    done = agentrl_run(
        tmp_path, "--task", '{"q": "Who are you?"}', "--gateway", url, "--model", "policy",
        "--api-key-env", "THEIR_KEY",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call policy" in done.stdout
    assert "I am elsewhere." in done.stdout
    assert [(a["model"], a["key"], a["path"]) for a in asked] == [
        ("policy", "Bearer sk-theirs", "/v1/chat/completions")
    ]


def test_the_task_must_be_an_object(tmp_path: Path) -> None:
    for task in ("[1]", "{"):
        done = agentrl_run(tmp_path, "--task", task)
        assert done.returncode == 2
        assert "task: " in done.stderr


def test_everything_recorded_has_a_place(tmp_path: Path) -> None:
    """Spans with unknown parents, calls without spans, retries: all are in the tree, once."""
    store = Store(str(tmp_path / "store.db"))
    run_id = store.create_run("r", "train", {}, Policies(on_error="retry", on_missing_reward=-1.0))
    [task] = store.add_tasks(run_id, "train", [{}])
    [rollout_id] = store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, 0, 0)])
    first = store.claim("runner", 60)
    assert first is not None
    (tmp_path / "log").write_text("\n".join(f"line {i}" for i in range(50)))
    store.end_attempt(first.attempt_id, AttemptState.ERROR, error="boom", log=str(tmp_path / "log"))
    second = store.claim("runner", 60)
    assert second is not None

    def span(name: str, span_id: str, parent: str | None, **attributes: Any) -> Span:
        return Span(
            "t", span_id, parent, name, "internal", 1, 2, "unset", attributes, [], {},
            rollout_id, second.attempt_id,
        )  # fmt: skip

    store.record_spans(
        [
            span("root-span", "s1", None),
            span("lost-parent", "s2", "nowhere"),
            span("chat-span", "s3", "s1", **{"gen_ai.response.id": "c2"}),
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
    console = Console(record=True, width=200)
    console.print(rollout_tree(store, rollout))
    store.close()
    shown = console.export_text()
    lines = {line.strip("│ ├└─"): len(line) - len(line.lstrip("│ ├└─")) for line in
             shown.splitlines()}  # fmt: skip

    def depth(start: str) -> int:
        [found] = [at for line, at in lines.items() if line.startswith(start)]
        return found

    assert depth("lost-parent") == depth("root-span")
    assert depth("asked  prompt-c2") == depth("asked  prompt-c1") + 4  # below chat-span
    assert depth("reward +0.25  turn") == depth("chat-span") + 4
    assert "cancelled" in shown
    assert "attempt 1  error" in shown
    assert "boom" in shown
    assert "line 49" in shown
    assert "line 29" not in shown
    assert shown.count("by player") == 3


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "user: hi"),
        (
            {"messages": [{}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            "(1 before) user: hi",
        ),
        ({"input": "hi"}, "hi"),
        ({"input": [{"type": "function_call_output", "output": "42"}]}, "function_call_output: 42"),
        ({"prompt": ["a", "b"]}, "b"),
        ({"prompt": [1, 2]}, "2"),
        (None, ""),
    ],
)
def test_prompts_of_every_protocol(request_: dict[str, Any] | None, expected: str) -> None:
    assert prompt_excerpt(request_) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"choices": [{"message": {"content": "hello"}}]}, "hello"),
        (
            {"choices": [{"message": {"content": None, "tool_calls": [
                {"function": {"name": "add", "arguments": '{"a": 1}'}}]}}]},
            '→ add({"a": 1})',
        ),
        ({"choices": [{"text": "hello"}]}, "hello"),
        ({"content": [{"type": "tool_use", "name": "add", "input": {"a": 1}}]}, '→ add({"a": 1})'),
        ({"output": [{"content": [{"type": "output_text", "text": "hello"}]}]}, "hello"),
    ],
)  # fmt: skip
def test_answers_of_every_protocol(response: dict[str, Any], expected: str) -> None:
    assert answer_excerpt(response) == expected
