"""An agent that looks for what it must not have, and the run that it spies on, as a script.

As a script it is the trainer: it runs two rollouts at a time and prints what they found, as JSON.
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import termios
import time
from pathlib import Path


def read_byte(path):
    with open(path, "rb") as file:
        file.read(1)


def spy(task):
    """Return what can be read of other processes, of the run's files, and in this process."""
    found = {"uid": os.getuid(), "read": [], "wrote": [], "memory": [], "open": [], "seen": []}
    Path(task["meeting"]).mkdir(exist_ok=True) if task["meets"] else None
    if task["meets"]:  # until the sibling is there, too
        (Path(task["meeting"]) / str(os.getpid())).touch()
        while len(siblings := os.listdir(task["meeting"])) < 2:
            time.sleep(0.01)
        found["seen"] = siblings
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        for name in ("environ", "mem", "maps", "fd"):
            path = f"/proc/{pid}/{name}"
            with contextlib.suppress(OSError):
                os.listdir(path) if name == "fd" else read_byte(path)
                said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "agentrl" in said or "spying" in said:
                    found["read"].append(f"{path} of {said}")
    for path in task["files"]:
        with contextlib.suppress(OSError):
            read_byte(path)
            found["read"].append(path)
        with contextlib.suppress(OSError):
            Path(path).open("ab").close()
            found["wrote"].append(path)
    # A pattern that is not what it matches: memory holds the pattern, too.
    secret = re.compile("".join(f"[{one}]" for one in reversed(task["terces"])).encode())
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line and "[v" not in line:
            with contextlib.suppress(OSError), open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(start)
                if secret.search(memory.read(end - start)):
                    found["memory"].append(line)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found["open"].append(os.readlink(f"/proc/self/fd/{number}"))
    with contextlib.suppress(OSError):
        Path("/tmp/written-by-an-agent").write_text("1")
    print("FOUND", json.dumps(found), flush=True)  # noqa: T201
    return 1.0


@contextlib.contextmanager
def gateway():
    """A gateway's process, as the supervisor starts it again: it has begun to read its plan."""
    command = [sys.executable, "-m", "agentrl.gateway.process", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        os.write(process.stdin.fileno(), b"{")
        while int.from_bytes(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)), "little"):
            assert process.poll() is None
            time.sleep(0.02)
        yield
        assert process.poll() is None
        process.kill()


def main(folder, settings):
    from runner_harness import RunnerHarness

    from agentrl.process_privacy import hide_memory

    hide_memory()
    harness = RunnerHarness(Path(folder) / "run")
    given = json.loads(settings)
    (harness.folder / "config.json").write_text("{}")
    (harness.folder / "config.json").chmod(0o600)
    harness.folder.chmod(0o711 if given.get("user") else 0o700)
    spec = f"{__file__}:spy"
    hidden = [str(harness.folder)]
    files = [str(harness.folder / name) for name in ("config.json", "store.db", "store.db-wal")]
    config = harness.config(f"-- {spec}", runners=2, hidden=hidden, **given)
    from dataclasses import replace

    from agentrl.runner.pool_client import start_pool

    harness.pools.append(start_pool(replace(config, agent=spec)))
    task = {"meeting": f"{folder}/meeting", "meets": not given, "files": files, "terces": "x" * 40}
    with contextlib.nullcontext() if given else gateway():
        attempts = harness.finish(harness.enqueue(task, 2), 40)
    logs = [Path(one.log or os.devnull).read_text() for one in attempts]
    errors = [one.error for one in attempts if one.error]
    modes = {str(p): oct(p.stat().st_mode & 0o777) for p in harness.folder.glob("logs/*")}
    harness.close()
    found = [json.loads(line[6:]) for log in logs for line in log.splitlines() if "FOUND" in line]
    print(json.dumps({"found": found, "errors": errors, "modes": modes, "logs": logs}))  # noqa: T201


if __name__ == "__main__":
    os.makedirs(f"{sys.argv[1]}/run")
    main(*sys.argv[1:])
