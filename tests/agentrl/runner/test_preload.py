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

pytest.importorskip("openai")

PACKAGE = "a_package_with_a_thread"
STARTS = f"{PACKAGE}.store"


@pytest.fixture
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
    if STARTS in sys.modules:
        sys.modules[STARTS].end.set()
    for name in (PACKAGE, f"{PACKAGE}.calm", STARTS):
        sys.modules.pop(name, None)


def test_a_module_that_starts_a_thread_is_named(package: None) -> None:
    with pytest.raises(StartedThreads, match=f"^{STARTS}$"):
        preload([PACKAGE, f"{PACKAGE}.calm", STARTS])


@pytest.mark.parametrize(("skip", "loaded"), [(STARTS, True), (PACKAGE, False)])
def test_what_is_skipped_and_what_is_not(package: None, skip: str, loaded: bool) -> None:
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
def state():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    fds = {link: os.readlink(link) for link in links if os.path.exists(link)}
    return fds, dict(os.environ), [thread.name for thread in threading.enumerate()]
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log: %(message)s")
for noisy in ("httpx", "httpx2"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
before = state()
preload.warm_up()
unchanged = state() == before
known = set(sys.modules)
preload._call_openai()
print(json.dumps([unchanged, connections, sorted(set(sys.modules) - known)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_warm_up_leaves_nothing_but_a_warm_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRACES], capture_output=True, text=True, check=True
    )
    *log, last = done.stdout.splitlines()
    assert log == []  # no call failed, and no library said anything
    assert json.loads(last) == [True, [], []]  # the next call imports nothing any more


def test_a_warm_up_that_fails_is_left_to_the_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preloading, "_call_openai", lambda: {}["another version"])
    monkeypatch.setattr(logging.getLogger("agentrl.runner"), "propagate", True)
    with caplog.at_level(logging.INFO, "agentrl.runner"):
        warm_up()
    assert "warming up openai failed: KeyError: 'another version'" in caplog.text


def test_a_thread_that_the_warm_up_leaves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    monkeypatch.setattr(preloading, "_call_openai", thread.start)
    monkeypatch.setattr(preloading, "_THREADS_END_S", 0.05)
    try:
        with pytest.raises(StartedThreads) as refused:
            warm_up()
        warm_up(skip={str(refused.value)})
    finally:
        ended.set()
