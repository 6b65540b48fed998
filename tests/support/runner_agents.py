"""Agents for the runners' tests: each does one thing that real agents do, or suffer from."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from agentrl import emit_reward


def any_of_these(task):
    return globals()[task["agent"]](task)


def good(task):
    print("hello from", task["n"])  # noqa: T201
    emit_reward(task["n"])


def returns(task):
    return task["n"] / 2


def both(task):
    emit_reward(1.0)
    return 5.0


def silent(task):
    return True


async def later(task):
    await asyncio.sleep(0.01)
    return 3


def raises(task):
    raise ValueError("bad task " + str(task["n"]))


def exits(task):
    sys.exit(4)


def exits_hard(task):
    os._exit(7)


def kills_itself(task):
    os.kill(os.getpid(), signal.SIGKILL)


def loops(task):
    while True:
        pass


def stubborn(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(100)


def family(task):
    child = subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
    print("sleeping", flush=True)  # noqa: T201
    Path(task["pids"]).write_text(f"{os.getpid()} {child.pid}")
    child.wait()


def daemonizes(task):
    """A grandchild in a session of its own, whose parent is gone: no group reaches it."""
    code = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
    code += "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(100)"
    subprocess.run([sys.executable, "-S", "-c", code, task["pids"]], start_new_session=True)
    while not os.path.exists(task["pids"]) or not os.path.getsize(task["pids"]):
        time.sleep(0.01)  # else it may be killed before it says who it is
    if task.get("stuck"):
        time.sleep(100)
    return 1.0


def deadlocks(task):
    lock = threading.Lock()
    other = threading.Thread(target=lambda: (lock.acquire(), lock.acquire()))  # not a daemon
    other.start()
    other.join()


def environment(task):
    Path(task["file"]).write_text(json.dumps(dict(os.environ)))


def numbered(task):
    """Hangs in the first attempt only."""
    marker = Path(task["marker"])
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        time.sleep(100)
    return 1.0


def pid(task):
    return os.getpid()


def goes(task):
    """Waits for a file, and then does what the task says."""
    while not Path(task["go"]).exists():
        time.sleep(0.01)
    if task["then"] == "raise":
        raise RuntimeError("connection refused")
    return 1.0


def floods(task):
    """Prints megabytes, from Python and from a command; then does what the task says."""
    line = "x" * 99
    print("the first line")  # noqa: T201
    for _ in range(task["mib"]):
        print("\n".join([line] * 10_486))  # noqa: T201
    time.sleep(0.2)  # a line printed during a cut may be lost
    subprocess.run(["sh", "-c", "echo said by a command"], check=True)
    print("the last line")  # noqa: T201
    return globals()[task["then"]](task)


async def shares_a_process(task):
    await asyncio.sleep(task["seconds"])
    if task["kills"]:
        os._exit(7)
    return 1.0


def kills_its_worker(task):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


_stored = []


def stores(task):
    """Stores what frameworks would; what the process's earlier attempts stored is still there."""
    assert all(map(os.path.isfile, _stored))
    folder = os.environ["DSPY_CACHEDIR"]
    os.makedirs(folder)  # fails if an earlier attempt did
    _stored.append(os.path.join(folder, "answers"))
    with open(_stored[-1], "w") as file:
        file.write("secret")
    with open(task["file"], "a") as file:
        file.write(_stored[-1] + "\n")
    return len(_stored)
