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
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from agentrl.process_privacy import hide_memory
from agentrl.runner.agent_process.confinement import become_user
from agentrl.runner.agent_process.environment import QUIET, attempt_environment, direct_to_gateway
from agentrl.runner.agent_spec import load_agent, parse_agent
from agentrl.runner.preload import (
    StartedThreads,
    installed_roots,
    preload,
    third_party_modules,
    warm_up,
)
from agentrl.runner.processes import ForkedChild, adopt_orphans, kill_children
from agentrl.runner.protocol import RunnerConfig, send
from agentrl.runner.worker import run_worker
from agentrl.supervisor import Backoff
from agentrl_tracer.schemas import Claim, Purpose
from agentrl_tracer.tracing import rollout_tracing

logger = logging.getLogger("agentrl.runner")

_SCOUT_TIMEOUT_S = 120
_PIONEER_S = 1.5  # longest wait of the other workers for the first attempt's lazy imports
_MOST_LESSONS = 6  # times that workers retire for newly learned modules
_STOP_GRACE_S = 5.0
_FORK_AGAIN_S = 5.0
_TICK_S = 0.25  # how late a fork that is due may come


@dataclass(slots=True)
class _Slot:
    """A place for a worker; ``child`` is None between two of them."""

    index: int
    child: ForkedChild | None = None
    due: float = 0.0
    running: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """By attempt of the worker, its rollout and number. If it dies, the next worker ends them."""
    code: int = 0  # of the last worker
    backoff: Backoff = field(default_factory=Backoff)


class Pool:
    """A pool of ``config.runners`` workers.

    Args:
        store: to the process that holds the store, which gets a socket for each worker.
        skip: modules and packages not to preload.
    """

    def __init__(self, config: RunnerConfig, store: socket.socket, skip: Sequence[str]) -> None:
        self.config = config
        self.agent = parse_agent(config.agent)
        self._store = store
        self._skip = skip
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
            self._fork(self._slots[0], self._run_scout)
        logger.info("pool %d: %d runners for %s", os.getpid(), len(self._slots), self.config.agent)
        while not self._stopping:
            now = time.monotonic()
            # After the scout, a worker of each gateway goes ahead, as one may be unwell.
            first = len(self.config.gateways) if self._lessons else 1
            for slot in self._slots[:first] if now < self._pioneer_until else self._slots:
                if slot.child is None and now >= slot.due:
                    self._fork_worker(slot)
            self._listen()
        self._stop_workers()

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True

    def _run_scout(self, control: socket.socket) -> NoReturn:
        """Do in this child what every attempt does: trace, import the agent, make a call with
        openai. Tell the pool which installed modules that needed."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.alarm(_SCOUT_TIMEOUT_S)
            known = len(sys.modules)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            # Clients made while the module is imported need a key and a URL.
            claim = Claim("scout", "scout", 0, "", Purpose.TRAIN, 0, "", {}, "sk-scout", 0.0)
            os.environ.update(attempt_environment(self.config, claim))
            failed = None
            try:
                if self.config.user is not None:
                    become_user(self.config.user)
                rollout_tracing()
                load_agent(self.config.agent)
                with contextlib.suppress(StartedThreads):
                    warm_up(self._skip)
            except BaseException as raised:
                failed = f"{type(raised).__name__}: {raised}"
            modules = third_party_modules(self.agent, known)
            send(control.fileno(), {"failed": failed, "modules": modules})
        finally:
            os._exit(0)

    def _learn(self, names: Iterable[str]) -> None:
        """Import modules, warm up with them, and make workers that lack them retire."""
        started = time.monotonic()
        try:
            count = preload(names, self._skip)
            if count == 0 and self._lessons:
                return
            self._lessons += 1
            warm_up(self._skip)
        except StartedThreads as error:
            self._start_over_without(str(error))
        logger.info("preloaded %d modules in %.1f s", count, time.monotonic() - started)
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every page after the fork
        for child in self._children:
            with contextlib.suppress(OSError):
                child.send({"retire": True})

    def _start_over_without(self, module: str) -> NoReturn:
        """Execute the pool again: threads do not survive a fork, and cannot be ended from here.

        Pid and standard input stay, so the trainer notices nothing.
        """
        logger.info("%s starts threads in the pool; it is left to the attempts", module)
        self._stop_workers()
        read, write = os.pipe()  # the configuration was read from stdin, which must stay open
        os.write(write, self.config.to_json().encode() + b"\n")
        os.close(write)
        for descriptor in (read, self._store.fileno()):
            os.set_inheritable(descriptor, True)
        descriptors = [str(self._store.fileno()), str(read)]
        argv = [sys.executable, "-m", "agentrl.runner.pool", *descriptors, module, *self._skip]
        os.execv(sys.executable, argv)

    def _fork_worker(self, slot: _Slot) -> None:
        store, theirs = socket.socketpair()
        with store, theirs:  # the worker keeps its copy
            with contextlib.suppress(OSError):  # the store's process has ended, and this one will
                socket.send_fds(self._store, [b"w"], [theirs.fileno()])
            theirs.close()
            run = partial(
                run_worker,
                self.config.of_worker(slot.index),
                slot.index,
                slot.running,
                slot.code,
                store,
            )
            self._fork(slot, run)
        if slot.child is not None:  # it has a copy
            slot.running.clear()

    def _fork(self, slot: _Slot, run: Callable[[socket.socket], NoReturn]) -> None:
        try:
            slot.child = ForkedChild(
                run, [self._store, *(child.socket for child in self._children)]
            )
        except OSError as error:
            logger.warning("could not fork a runner: %s", error)
            slot.due = time.monotonic() + _FORK_AGAIN_S

    @property
    def _children(self) -> list[ForkedChild]:
        return [slot.child for slot in self._slots if slot.child is not None]

    def _listen(self) -> None:
        """Sleep until a child says something or dies, or the trainer is gone, but not for long."""
        sockets = [child.socket for child in self._children]
        readable, _, _ = select.select([0, *sockets], [], [], _TICK_S)
        if 0 in readable and not os.read(0, 1024):
            self._stopping = True
        if os.getppid() != self._parent:  # in case a sibling process holds the pipe open
            self._stopping = True
        for slot in self._slots:
            if slot.child is not None and slot.child.socket in readable:
                self._hear(slot, slot.child)

    def _hear(self, slot: _Slot, child: ForkedChild) -> None:
        for message in child.messages():
            if failed := message.get("failed"):
                logger.warning("importing the agent failed: %s", failed)
            if "modules" in message and self._lessons < _MOST_LESSONS:
                self._learn(message["modules"])
            if "claimed" in message:  # the first attempt begins, or has begun
                slot.running[message["claimed"]] = message["of"]
                self._pioneer_until = min(self._pioneer_until, time.monotonic() + _PIONEER_S)
            if "ended" in message:
                slot.running.pop(message["ended"], None)
                self._pioneer_until = 0.0
        if child.alive:
            return
        code = child.kill()  # useless without its socket
        slot.child, slot.code, slot.due = None, code, time.monotonic()
        if code != 0 and not self._stopping:
            delay = slot.backoff.after(slot.due - child.started)
            slot.due += delay
            said = "runner %d (pid %d) ended with %d; another one follows in %.1f s"
            logger.warning(said, slot.index, child.pid, code, delay)
        kill_children(keep=[other.pid for other in self._children])

    def _stop_workers(self) -> None:
        """Stop workers and scout, and wait; kill the slow ones."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.send({"stop": True})
            child.signal(signal.SIGTERM)  # ends the scout
        deadline = time.monotonic() + _STOP_GRACE_S
        for child in self._children:
            while child.alive and time.monotonic() < deadline:
                select.select([child.socket], [], [], 0.1)
                for _ in child.messages():
                    pass
            child.kill()
        kill_children()


def main() -> None:
    """Run a pool; ``argv`` has its socket to the store, stdin its configuration as a line.

    Executed again, that line is in the next descriptor in ``argv``; modules to skip follow.
    """
    # Not on the root logger: the agent configures logging as it likes.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(os.environ.get("AGENTRL_LOG_LEVEL", "INFO").upper())
    hide_memory()
    store = socket.socket(fileno=int(sys.argv[1]))
    store.set_inheritable(False)
    source, *skip = sys.argv[2:] or ["0"]
    with open(int(source), "rb", closefd=source != "0") as lines:
        config = RunnerConfig.from_json(lines.readline())
    Pool(config, store, skip).run()


if __name__ == "__main__":
    main()
