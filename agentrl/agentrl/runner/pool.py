"""The pool: preload modules, fork the workers, fork again those that die.

Single-threaded, because it forks. It ends when its standard input does: the trainer holds the other
end.

The pool learns twice which modules to preload: from a *scout*, a child that only imports the agent
while the gateway is still starting, and from what the first attempts turn out to import lazily.
After each lesson its workers retire after their attempt and are forked again, warm.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import NoReturn

# The attempt's own imports, so that every fork has them: OpenTelemetry and the tracer among them.
import agentrl_tracer.emit  # noqa: F401
from agentrl.runner.agent_process.environment import (
    QUIET,
    attempt_environment,
    check_environment,
    direct_to_gateway,
)
from agentrl.runner.agent_process.loading import load_agent
from agentrl.runner.agent_spec import parse_agent
from agentrl.runner.preload import (
    StartedThreads,
    installed_roots,
    preload,
    third_party_modules,
    warm_up,
)
from agentrl.runner.protocol import RunnerConfig, take_lines
from agentrl.runner.subreaper import adopt_orphans, kill_children
from agentrl.runner.worker import run_worker
from agentrl.supervisor import Backoff
from agentrl_tracer.schemas import Claim, Purpose

logger = logging.getLogger("agentrl.runner")

_SCOUT_TIMEOUT_S = 120.0
_PIONEER_S = 1.5  # longest wait of the other workers for the first attempt's lazy imports
_MOST_LESSONS = 6  # times that workers retire for newly learned modules
_STOP_GRACE_S = 5.0
_FORK_AGAIN_S = 5.0
_SKIP = "AGENTRL_RUNNER_SKIP"  # modules and packages not to preload, across the re-execution


@dataclass(slots=True)
class _Slot:
    """A place for a worker; ``pid`` is None between two of them."""

    index: int
    pid: int | None = None
    control: socket.socket | None = None
    started: float = 0.0
    due: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)
    received: bytearray = field(default_factory=bytearray)


class Pool:
    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.agent = parse_agent(config.agent)
        self.deaths = 0
        self._skip = frozenset(filter(None, os.environ.get(_SKIP, "").split(",")))
        self._slots = [_Slot(i) for i in range(config.runners)]
        self._stopping = False
        self._parent = os.getppid()
        self._lessons = 0
        self._pioneer_until = float("inf")

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # All attempts have these, so scout and warm-up get them, too.
        os.environ.update(QUIET | direct_to_gateway(self.config.gateway))
        adopt_orphans()  # detached processes of the agents of a worker that is killed
        # Cached before the fork, rather than computed in every attempt.
        installed_roots()
        tempfile.gettempdir()
        if self.agent.kind == "command" or self.config.python is not None:
            self._pioneer_until = 0.0  # the agent's modules are in another process
            self._learn([])
        else:
            self._learn(self._scout())
        logger.info("pool %d: %d runners for %s", os.getpid(), len(self._slots), self.config.agent)
        while not self._stopping:
            self._fork_due()
            self._wait(0.25)
        self._stop_workers()

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True

    def _scout(self) -> list[str]:
        """Import the agent in a child; return the installed modules which that needed."""
        read, write = os.pipe()
        known = frozenset(sys.modules)
        pid = _fork()
        if pid == 0:
            os.close(read)
            self._run_scout(write, known)
        os.close(write)
        received = bytearray()
        deadline = time.monotonic() + _SCOUT_TIMEOUT_S
        while not self._stopping and time.monotonic() < deadline:
            readable, _, _ = select.select([read, 0], [], [], 0.25)
            self._check_parent(readable)
            if read in readable:
                chunk = os.read(read, 65536)
                if not chunk:
                    break
                received += chunk
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            answer = json.loads(received)
        except ValueError:
            logger.warning("the agent could not be imported within %g s", _SCOUT_TIMEOUT_S)
            return []
        if answer["error"]:
            logger.warning("importing the agent failed: %s", answer["error"])
        return answer["modules"]

    def _run_scout(self, write: int, known: frozenset[str]) -> NoReturn:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            # Clients made while the module is imported need a key and a URL.
            claim = Claim("scout", "scout", 0, "", Purpose.TRAIN, 0, "", {}, "sk-scout", 0.0)
            os.environ.update(attempt_environment(self.config, claim))
            error = None
            try:
                load_agent(self.config.agent)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
            modules = third_party_modules(self.agent, known)
            with os.fdopen(write, "w") as pipe:
                json.dump({"modules": modules, "error": error}, pipe)
        finally:
            os._exit(0)

    def _learn(self, names: list[str]) -> None:
        """Import modules, warm up with them, and make workers that lack them retire."""
        started = time.monotonic()
        try:
            count = preload(names, self._skip)
            if count == 0 and self._lessons:
                return
            self._lessons += 1
            warm_up(self._skip)
        except StartedThreads as error:
            self._start_over_without(error.module)
        logger.info("preloaded %d modules in %.1f s", count, time.monotonic() - started)
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every page after the fork
        for slot in self._slots:
            if slot.control is not None:
                with contextlib.suppress(OSError):
                    slot.control.send(b"r")

    def _start_over_without(self, module: str) -> NoReturn:
        """Execute the pool again: threads do not survive a fork, and cannot be ended from here.

        Pid and standard input stay, so the trainer notices nothing.
        """
        logger.info("%s starts threads in the pool; it is left to the attempts", module)
        self._stop_workers()
        os.environ[_SKIP] = ",".join(sorted({*self._skip, module}))
        read, write = os.pipe()  # the configuration was read from stdin, which must stay open
        os.write(write, self.config.to_json().encode() + b"\n")
        os.close(write)
        os.set_inheritable(read, True)
        os.execv(sys.executable, [sys.executable, "-m", "agentrl.runner", str(read)])

    def _fork_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.index and now < self._pioneer_until:
                break  # the first worker goes ahead
            if slot.pid is None and now >= slot.due:
                self._fork_worker(slot)

    def _fork_worker(self, slot: _Slot) -> None:
        ours, theirs = socket.socketpair()
        try:
            pid = _fork()
        except OSError as error:
            logger.warning("could not fork a runner: %s", error)
            ours.close()
            theirs.close()
            slot.due = time.monotonic() + _FORK_AGAIN_S
            return
        if pid == 0:
            ours.close()
            for other in self._slots:  # or another worker would not see the end of its socket
                if other.control is not None:
                    other.control.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            run_worker(self.config, slot.index, theirs)
        theirs.close()
        ours.setblocking(False)
        slot.pid, slot.control, slot.started = pid, ours, time.monotonic()
        slot.received.clear()

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a worker says something or dies, or the trainer is gone."""
        slots = {slot.control.fileno(): slot for slot in self._slots if slot.control is not None}
        now = time.monotonic()
        due = [slot.due for slot in self._slots if slot.pid is None]
        if self._pioneer_until > now:
            due = [self._pioneer_until]
        soon = min([timeout_s, *(max(0.0, at - now) for at in due)])
        readable, _, _ = select.select([0, *slots], [], [], soon)
        self._check_parent(readable)
        for fd in readable:
            if fd:
                self._hear(slots[fd])

    def _check_parent(self, readable: list[int]) -> None:
        if 0 in readable and not os.read(0, 1024):
            self._stopping = True
        if os.getppid() != self._parent:  # in case a sibling process holds the pipe open
            self._stopping = True

    def _hear(self, slot: _Slot) -> None:
        assert slot.control is not None
        try:
            chunk = slot.control.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._bury(slot)
            return
        slot.received += chunk
        for line in take_lines(slot.received):
            message = json.loads(line)
            if self._pioneer_until == float("inf"):
                self._pioneer_until = time.monotonic() + _PIONEER_S
            if "modules" in message and self._lessons < _MOST_LESSONS:
                self._learn(message["modules"])
            if "ended" in message:
                self._pioneer_until = 0.0

    def _bury(self, slot: _Slot) -> None:
        assert slot.pid is not None
        assert slot.control is not None
        slot.control.close()
        slot.control = None
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot.pid, signal.SIGKILL)  # useless without its socket
        code = os.waitstatus_to_exitcode(os.waitpid(slot.pid, 0)[1])
        now = time.monotonic()
        slot.due = now
        if code != 0 and not self._stopping:
            self.deaths += 1
            delay = slot.backoff.after(now - slot.started)
            slot.due = now + delay
            logger.warning(
                "runner %d (pid %d) ended with %d; number %d to die, again in %.1f s",
                slot.index, slot.pid, code, self.deaths, delay,
            )  # fmt: skip
        slot.pid = None
        kill_children(keep={other.pid for other in self._slots if other.pid is not None})

    def _stop_workers(self) -> None:
        """Close the workers' sockets, which stops them, and wait; kill the slow ones."""
        waiting = [slot for slot in self._slots if slot.pid is not None]
        for slot in waiting:
            if slot.control is not None:
                slot.control.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _STOP_GRACE_S
        for slot in waiting:
            assert slot.pid is not None
            while time.monotonic() < deadline:
                pid, _ = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    break
                time.sleep(0.01)
            else:
                os.kill(slot.pid, signal.SIGKILL)
                os.waitpid(slot.pid, 0)
            if slot.control is not None:
                slot.control.close()
            slot.pid, slot.control = None, None
        kill_children()


def main() -> int:
    """Run a pool; its configuration is the first line of stdin (or of the given descriptor)."""
    # Not on the root logger: the agent configures logging as it likes.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(os.environ.get("AGENTRL_LOG_LEVEL", "INFO").upper())
    source = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    line = _read_line(source)
    if source:
        os.close(source)
    if not line:
        logger.error("no configuration on standard input")
        return 2
    try:
        check_environment()
        config = RunnerConfig.from_json(line)
    except (RuntimeError, ValueError, TypeError) as error:
        logger.error("%s", error)
        return 2
    Pool(config).run()
    return 0


def _read_line(fd: int) -> str:
    """Read one line, and not a byte more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return ""
        line += byte
    return line.decode()


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()
