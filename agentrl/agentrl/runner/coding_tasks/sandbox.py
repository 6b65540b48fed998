"""Run commands in bubblewrap with their own files in sight, and nothing else of the user's.

The agent's own sandbox (``agent_process.confinement``) hides the run and shows the rest of the file
system. This one shows the system, the interpreters of the command, and its folders alone: hidden
files and test commands may lie anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import agentrl
from agentrl.runner.coding_tasks.printed import Printed
from agentrl.runner.coding_tasks.relay import relay
from agentrl.runner.processes import adopt_orphans, kill_children

_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix",
    "/run/systemd/resolve", "/run/resolvconf", "/run/nscd",
)  # fmt: skip
_RELAY = Path(__file__).with_name("relay.py")
_PROGRAMS = (
    "python3", "python", "node", "bash", "git",
    "aider", "claude", "codex", "gemini", "mini", "opencode", "qwen",
)  # fmt: skip
_OF_FILES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER")
_OF_THE_SYSTEM = ("/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
OF_TESTS = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables that tests see."""
_MORE = "AGENTRL_SANDBOX_PATHS"
"""Variable that names further folders to show, separated as in PATH."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command runs, and what it may use and see."""

    work: Path
    home: Path
    sandbox: bool
    writable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    cpu_seconds: float | None = None
    memory_mb: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    """Its exit code, negative for a signal."""
    timed_out: bool = False
    asked: bool = True
    """Whether it reached the gateway; without a relay that is not known."""
    printed: str = ""
    """Its output, if it was to be kept: the first and the last MiB."""


def check_bubblewrap() -> None:
    """Check that commands can be confined here.

    Raises:
        ValueError: there is no bubblewrap, or it may not make namespaces.
    """
    otherwise = 'or say "sandbox": false in the tasks, and the agent can find the hidden files'
    if shutil.which("bwrap") is None:
        raise ValueError(f"tasks with tests need bubblewrap: apt install bubblewrap; {otherwise}")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), Path(folder), sandbox=True)
        command = [*_bubblewrap(place, ["true"], network=False), "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"bubblewrap makes no sandbox here: {done.stderr.strip()}; {otherwise}")


def run(
    command: Sequence[str],
    place: Place,
    env: Mapping[str, str],
    *,
    gateway: str | None = None,
    network: bool = False,
    stdin: bytes = b"",
    keep_output: bool = False,
    seconds: float | None = None,
) -> Done:
    """Run a command to its end, or to its time limit; nothing that it started goes on.

    Args:
        gateway: URL that it reaches, though it may not reach the network.
        keep_output: return what it prints; by default that goes to the attempt's log.
    """
    options = {"cpu": _whole(place.cpu_seconds), "memory": _whole(place.memory_mb, 2**20)}
    temporary = "/tmp" if place.sandbox else str(place.home)  # the sandbox has its own
    env = {**env, "HOME": str(place.home), "TMPDIR": temporary}
    with contextlib.ExitStack() as stack:
        asked = threading.Event()
        if place.sandbox and gateway is not None and not network:
            path = stack.enter_context(_relay_to(gateway, asked))
            port = urlsplit(gateway).port or 80
            env = {name: _local(value, gateway, port) for name, value in env.items()}
            place = _seeing(place, path.parent)
            options |= {"socket": str(path), "port": port}
        else:
            asked.set()
        python = os.path.realpath(sys.executable)
        inside = [python, "-I", str(_RELAY), json.dumps(options), *command]
        if place.sandbox:
            inside = [*_bubblewrap(place, command, network=network), *inside]
        printed = Printed() if keep_output else None
        adopt_orphans()
        try:
            process = subprocess.Popen(
                inside, stdin=subprocess.PIPE, stdout=printed and printed.pipe,
                stderr=printed and subprocess.STDOUT, cwd=place.work, env=env,
            )  # fmt: skip
        finally:
            if printed is not None:
                printed.close()
        timed_out = False
        try:
            process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            process.kill()
            process.wait()
            kill_children()
        said = printed.text() if printed is not None else ""
        return Done(process.returncode, timed_out, asked.is_set(), said)


def _whole(value: float | None, unit: int = 1) -> int | None:
    return None if value is None else max(int(value * unit), 1)


def _seeing(place: Place, folder: Path) -> Place:
    return Place(
        place.work, place.home, place.sandbox, [*place.writable, folder], place.hidden,
        place.cpu_seconds, place.memory_mb,
    )  # fmt: skip


def _local(value: str, gateway: str, port: int) -> str:
    return value.replace(gateway.rstrip("/"), f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def _relay_to(gateway: str, asked: threading.Event) -> Iterator[Path]:
    """Listen at a Unix socket for the gateway's sake, and refuse what gives rewards.

    Args:
        asked: is set by the first connection.
    """
    try:
        from agentrl.runner.coding_tasks.guard import pass_requests as forward
    except ModuleNotFoundError as missing:
        raise ValueError(f"{sys.executable}: {missing}; pip install {missing.name}") from None
    parts = urlsplit(gateway)
    if parts.scheme != "http":
        raise ValueError('limits.network: the gateway speaks https; say {"network": true}')
    address = parts.hostname or "", parts.port or 80

    def connect() -> socket.socket:
        asked.set()
        return socket.create_connection(address)

    with (
        tempfile.TemporaryDirectory(prefix="agentrl-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(folder) / "gateway"
        listener.bind(str(path))
        listener.listen(64)
        threading.Thread(target=relay, args=(listener, connect, forward), daemon=True).start()
        yield path
        with contextlib.suppress(OSError):  # wakes ``accept``
            listener.shutdown(socket.SHUT_RDWR)


def _bubblewrap(place: Place, command: Sequence[str], *, network: bool) -> list[str]:
    """Return the command that runs another one, which follows, in a sandbox."""
    words = ["bwrap", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
    words += without_privileges(root=os.geteuid() == 0)
    seen = sorted({*_SYSTEM, *_installed(command), str(_RELAY)})  # a folder before those in it
    for path in seen:
        words += ["--ro-bind-try", path, path]
    for path in map(os.path.realpath, (*place.hidden, *_shipped_tasks())):
        if os.path.isdir(path) and path.startswith(tuple(seen)):
            words += ["--tmpfs", path]
    for path in map(str, (place.work, place.home, *place.writable)):
        words += ["--bind", path, path]
    words += ["--chdir", str(place.work), "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
    return [*words, *([] if network else ["--unshare-net"]), "--"]


def without_privileges(*, root: bool) -> list[str]:
    """Return the options that take the command's privileges; they follow ``--proc``.

    Bubblewrap leaves root its own, with which a command could undo the mounts that hide files.
    Root keeps those over other users' files, which a mount stops.

    Args:
        root: the command runs as root.
    """
    words = ["--cap-drop", "ALL"]
    if root:
        words += [word for one in _OF_FILES for word in ("--cap-add", one)]
        words += [word for path in _OF_THE_SYSTEM for word in ("--ro-bind-try", path, path)]
    return words


def _installed(command: Sequence[str]) -> Iterable[str]:
    """Yield what the command, usual agents and interpreters need, and the files it names."""
    for name in (command[0], sys.executable, *_PROGRAMS):
        if found := shutil.which(name):
            for path in {os.path.abspath(found), os.path.realpath(found)}:
                yield from (needed := [*_package(path)])
                for prefix in needed:
                    if os.path.exists(f"{prefix}/pyvenv.cfg"):
                        yield from _package(os.path.realpath(f"{prefix}/bin/python"))
    for word in command:
        if os.path.isabs(word) and os.path.isfile(word):
            folder = os.path.dirname(word)
            yield folder if os.path.exists(f"{folder}/profile.toml") else word
    yield from filter(os.path.isabs, os.environ.get(_MORE, "").split(os.pathsep))


def _package(executable: str) -> Iterable[str]:
    """Yield the paths of all that an executable's package needs.

    Of a folder that holds more of the user's files than a package, such as the home folder or the
    current one, it is the file alone.
    """
    outer, node, _ = executable.partition("/node_modules/")
    if node:  # npm puts what a package depends on beside it
        yield f"{outer}/node_modules"
        return
    folder = Path(executable).parent
    prefix, home = folder.parent, Path.home()
    of_user = [home, home.resolve(), home / ".local", home.resolve() / ".local", Path.cwd()]
    is_package = folder.name in ("bin", "shims")
    is_package &= not any(one.is_relative_to(prefix) for one in of_user)
    if is_package or (prefix / "pyvenv.cfg").is_file():
        yield str(prefix)
    else:
        yield executable
        if prefix.name == ".local":  # of `pip install --user`
            yield f"{prefix}/lib"


def _shipped_tasks() -> Iterable[Path]:
    """Yield the folder of tasks that comes with the package: their tests are no agent's."""
    yield Path(agentrl.__path__[0]) / "coding_agents/tasks"
