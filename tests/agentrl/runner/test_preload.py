"""Preloading leaves modules that start threads to the attempts; the warm-up leaves no trace."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.runner import preload as preloading
from agentrl.runner.preload import StartedThreads, preload, warm_up

PACKAGE = "a_package_with_a_thread"
STARTS = f"{PACKAGE}.store"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "calm.py").touch()
    (folder / "store.py").write_text(
        "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        module = sys.modules.pop(name)
        if name == STARTS:
            module.end.set()


def test_the_module_is_named() -> None:
    with pytest.raises(StartedThreads) as refused:
        preload([PACKAGE, f"{PACKAGE}.calm", STARTS])
    assert refused.value.module == STARTS


@pytest.mark.parametrize(("skip", "loaded"), [(STARTS, True), (PACKAGE, False)])
def test_what_is_skipped_and_what_is_not(skip: str, loaded: bool) -> None:
    preload([STARTS, f"{PACKAGE}.calm"], skip={skip})
    assert STARTS not in sys.modules
    assert (f"{PACKAGE}.calm" in sys.modules) is loaded


# In a process of its own: there everything is as cold as in a pool, and nothing else runs.
TRACES = """
import json, logging, os, socket, sys, threading
import openai
from agentrl.runner import preload

connections = []
def connect(self, address):
    connections.append(address)
    raise OSError("no traffic during a warm-up")
socket.socket.connect = socket.socket.connect_ex = connect
def fds(): return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{fd}")}
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log: %(message)s")
for noisy in ("httpx", "httpx2"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
fds_before, env_before = fds(), dict(os.environ)
preload.warm_up()
fds_after, env_after = fds(), dict(os.environ)
known = set(sys.modules)
preload._call_openai()
print(json.dumps({
    "connections": connections,
    "threads": [thread.name for thread in threading.enumerate()],
    "fds": fds_before == fds_after,
    "env": env_before == env_after,
    "late": sorted(set(sys.modules) - known),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_warm_up_leaves_nothing_but_a_warm_library() -> None:
    pytest.importorskip("openai")
    done = subprocess.run(
        [sys.executable, "-c", TRACES], capture_output=True, text=True, check=True
    )
    *log, last = done.stdout.splitlines()
    assert log == []  # no call failed, and no library said anything
    assert json.loads(last) == {
        "connections": [], "threads": ["MainThread"], "fds": True, "env": True,
        "late": [],  # the next call imports nothing any more
    }  # fmt: skip


def test_a_warm_up_that_fails_is_left_to_the_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openai")

    def fail() -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(preloading, "_call_openai", fail)
    monkeypatch.setattr(logging.getLogger("agentrl.runner"), "propagate", True)
    with caplog.at_level(logging.INFO, "agentrl.runner"):
        warm_up()
    assert "warming up openai failed: RuntimeError: another version" in caplog.text


def test_a_thread_that_the_warm_up_leaves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    ended = threading.Event()
    monkeypatch.setattr(
        preloading,
        "_call_openai",
        lambda: threading.Thread(target=ended.wait, daemon=True).start(),
    )
    monkeypatch.setattr(preloading, "_THREADS_END_S", 0.05)
    try:
        with pytest.raises(StartedThreads) as refused:
            warm_up()
        warm_up(skip={refused.value.module})
    finally:
        ended.set()
