"""The rehearsal before the fork: what it must not leave behind, and what attempts gain from it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.runner import warmup as rehearsal
from agentrl.runner.preload import StartedThreads

# In a process of its own: there everything is as cold as in a pool, and nothing else runs.
TRACES = """
import gc, json, os, socket, sys, threading
import openai
from agentrl.runner import rehearsal

connections = []
def connect(self, address):
    connections.append(address)
    raise OSError("no traffic during a rehearsal")
socket.socket.connect = socket.socket.connect_ex = connect
def fds(): return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{fd}")}
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log: %(message)s")
for noisy in ("httpx", "httpx2"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
fds_before, env_before = fds(), dict(os.environ)
rehearsal.rehearse()
fds_after, env_after = fds(), dict(os.environ)
known = set(sys.modules)
with openai.OpenAI(
    api_key="k",
    base_url="http://127.0.0.1:9",
    http_client=openai.DefaultHttpxClient(transport=rehearsal._stand_in(openai)),
) as client:
    answer = client.chat.completions.create(**rehearsal._CALL)
print(json.dumps({
    "connections": connections,
    "threads": [thread.name for thread in threading.enumerate()],
    "fds": [fds_before, fds_after],
    "env": [env_before, env_after],
    "late": sorted(set(sys.modules) - known),
    "answer": answer.choices[0].message.content,
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_it_leaves_nothing_but_warm_libraries() -> None:
    pytest.importorskip("openai")
    done = subprocess.run(
        [sys.executable, "-c", TRACES], capture_output=True, text=True, check=True
    )
    *log, last = done.stdout.splitlines()
    assert log == []  # no scene failed, and no library said anything
    found = json.loads(last)
    assert found["connections"] == []
    assert found["threads"] == ["MainThread"]
    assert found["fds"][0] == found["fds"][1]
    assert found["env"][0] == found["env"][1]
    assert found["late"] == []  # the next call imports nothing any more
    assert found["answer"] == "Yes."


def test_it_imports_no_client_that_is_not_loaded() -> None:
    code = "import sys; from agentrl.runner.warmup import rehearse; rehearse(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "requests" in loaded  # every attempt exports its spans
    assert not loaded & {"openai", "httpx", "httpx2", "httpcore", "httpcore2"}


def test_a_scene_that_fails_is_left_to_the_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def _ask_openai() -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(rehearsal, "_ask_openai", _ask_openai)
    monkeypatch.setattr(logging.getLogger("agentrl.runner"), "propagate", True)
    with caplog.at_level(logging.INFO, "agentrl.runner"):
        rehearsal.rehearse()
    assert "rehearsing ask_openai failed: RuntimeError: another version" in caplog.text


def test_a_thread_left_behind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def _ask_openai() -> None:
        threading.Thread(target=ended.wait, daemon=True).start()

    monkeypatch.setattr(rehearsal, "_ask_openai", _ask_openai)
    monkeypatch.setattr(rehearsal, "_PATIENCE_S", 0.05)
    try:
        with pytest.raises(StartedThreads) as refused:
            rehearsal.rehearse()
    finally:
        ended.set()
    assert refused.value.module == rehearsal.__name__


@pytest.mark.parametrize("skip", ["", rehearsal.__name__])
def test_a_pool_rehearses_before_it_freezes_unless_it_must_not(tmp_path: Path, skip: str) -> None:
    code = f"""
import gc, sys
from agentrl.runner.config import RunnerConfig
from agentrl.runner.pool import Pool
config = RunnerConfig("{tmp_path}/s.db", "http://127.0.0.1:9", None, "sh", "m", "{tmp_path}")
Pool(config)._learn([])
print("requests" in sys.modules, gc.get_freeze_count() > 1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "AGENTRL_RUNNER_SKIP": skip},
    )  # fmt: skip
    assert done.stdout.strip() == f"{not skip} True"


def test_a_forked_child_still_exports_after_it(tmp_path: Path) -> None:
    """With a rehearsed process as its parent, as every attempt has."""
    code = """
import http.server, os, sys, threading
from agentrl.runner.warmup import rehearse
from agentrl import emit_reward
from agentrl_tracer.tracing import flush
rehearse()
paths = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        paths.append((self.path, self.headers["authorization"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
if os.fork() == 0:
    os.environ.update(AGENTRL_ROLLOUT_ID="r1", AGENTRL_ATTEMPT_ID="a1", AGENTRL_KEY="secret",
                      AGENTRL_GATEWAY=f"http://127.0.0.1:{server.server_port}")
    emit_reward(1.0)
    os._exit(0 if flush() else 1)
server.handle_request()
print(os.waitstatus_to_exitcode(os.wait()[1]), paths)
"""
    # A password for the host in ~/.netrc must not take the place of the rollout's key.
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password other\n")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, timeout=30,
        env={**os.environ, "HOME": str(tmp_path), "NETRC": str(netrc)},
    )  # fmt: skip
    assert done.stdout.strip() == "0 [('/rollouts/r1/v1/traces', 'Bearer secret')]"
