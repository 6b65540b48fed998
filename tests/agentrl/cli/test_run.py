"""``agentrl run``: one task with a model that is loaded here, or with another server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import agentrl
from provider_servers import FaultyServer, said

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
        "attempt 1 error", "1 call,", "invoke_workflow agent", "call agentrl-tiny",
        "user: Who are you?", "reward +0.5 style well put", "the agent printed this",
        "KeyError: 'oops'",
    ):  # fmt: skip
        assert part in shown, done.stdout
    # The same tree later, from the folder.
    [folder] = (tmp_path / "runs").iterdir()
    with contextlib.closing(Store(str(folder / "store.db"))) as store:
        [rollout] = store.rollouts((folder / "run_id").read_text())
    again = agentrl("runs", "rollout", rollout.id, "--runs", tmp_path / "runs")
    assert again.stdout in done.stdout
    assert again.returncode == 0
    assert re.search(r"run-\S+ +run +finished", agentrl("runs", "list", tmp_path / "runs").stdout)


def test_another_server_may_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "sk-theirs")
    with contextlib.closing(FaultyServer((200, said("I am elsewhere.")))) as server:
        given = ("--gateway", server.url, "--model", "policy", "--api-key-env", "THEIR_KEY")
        done = run(tmp_path, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call policy" in done.stdout
    assert "I am elsewhere." in done.stdout
    [asked] = server.seen
    assert asked["path"] == "/v1/chat/completions"
    assert asked["headers"]["authorization"] == "Bearer sk-theirs"
    assert asked["body"]["model"] == "policy"
