"""``agentrl run``: one task with a model that is loaded here, or with another server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import agentrl

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


def run(folder: Path, *flags: str, **task: Any) -> subprocess.CompletedProcess[str]:
    (folder / "agents.py").write_text(AGENT)
    told = json.dumps({"q": "Who are you?", **task})
    return agentrl("run", "agents.py:agent", "--task", told, *flags, cwd=folder)


def test_a_failing_task_shows_its_trace(tmp_path: Path) -> None:
    done = run(tmp_path, fail=True)
    assert done.returncode == 1, done.stderr
    shown = " ".join(done.stdout.split())
    for part in (
        "attempt 1 error", "1 calls", "invoke_workflow agent", "call agentrl-tiny",
        "user: Who are you?", "reward +0.5 style well put", "the agent printed this",
        "KeyError: 'oops'",
    ):  # fmt: skip
        assert part in shown, done.stdout
    # The same tree later, from the folder.
    [folder] = (tmp_path / "runs").iterdir()
    with contextlib.closing(Store(str(folder / "store.db"))) as store:
        [rollout] = store.rollouts((folder / "run_id").read_text())
    again = agentrl("runs", "show", folder, "--rollout", rollout.id)
    assert again.stdout in done.stdout
    assert again.returncode == 0
    assert re.search(r"run-\S+ +run +finished", agentrl("runs", "list", tmp_path / "runs").stdout)


@pytest.fixture
def openai_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of chat completions, and what it was asked."""
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
        thread.join()


def test_another_server_may_answer(
    tmp_path: Path, openai_server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = openai_server
    monkeypatch.setitem(os.environ, "THEIR_KEY", "sk-theirs")
    given = ("--gateway", url, "--model", "policy", "--api-key-env", "THEIR_KEY")
    done = run(tmp_path, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call policy" in done.stdout
    assert "I am elsewhere." in done.stdout
    assert [(a["model"], a["key"], a["path"]) for a in asked] == [
        ("policy", "Bearer sk-theirs", "/v1/chat/completions")
    ]
