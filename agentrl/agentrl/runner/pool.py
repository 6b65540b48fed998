"""The pool: imports the agent's frameworks once, forks runners, replaces those that end.

A process of its own, because it forks and the trainer (whose torch has threads) must not. It holds
installed packages only, never the user's module, so editing the agent needs no restart and rollouts
share nothing that the user wrote.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from agentrl.runner.agent import load_agent
from agentrl.runner.attempt import third_party_modules
from agentrl.runner.config import SETTINGS, RunnerConfig
from agentrl.runner.worker import run_worker
from agentrl.supervisor import Supervised, python_module

logger = logging.getLogger("agentrl.runner")

_TICK_S = 0.2
_SCOUT_PATIENCE_S = 60.0
_STOP_GRACE_S = 5.0
_CRASH_PAUSE_S = 0.5  # before a runner that failed is replaced


def start_pool(config: RunnerConfig) -> Supervised:
    """Starts the pool under supervision.

    Raises:
        ValueError: the environment switches OpenTelemetry off, so nothing could be traced.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        raise ValueError(
            "OTEL_SDK_DISABLED is 'true' in the environment: that silences our spans and rewards "
            "as well; unset it (CREWAI_DISABLE_TELEMETRY=true is set for you)"
        )
    return Supervised(
        "runners",
        python_module("agentrl.runner"),
        Path(config.logs) / "runners.log",
        env={SETTINGS: json.dumps(asdict(config))},
    )


class Pool:
    """Keeps ``config.runners`` runners alive until standard input closes or SIGTERM comes."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._preloaded: set[str] = set()
        self._runners: set[int] = set()
        self._stopping = False
        self._report_read, self._report_write = os.pipe()
        self._partial = b""

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._preload(self._scout())
        while not self._stopping:
            while len(self._runners) < self._config.runners:
                self._fork_runner()
            readable = select.select([0, self._report_read], [], [], _TICK_S)[0]
            if 0 in readable and not os.read(0, 1024):
                break  # whoever started us is gone
            if self._report_read in readable:
                self._learn()
            self._reap()
        self._end_runners()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _fork_runner(self) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(self._report_read)
            run_worker(self._config, self._preloaded, self._report_write)
        self._runners.add(pid)

    def _reap(self) -> None:
        for pid in list(self._runners):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._runners.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                if code != 0:
                    logger.warning("a runner ended with %s and is replaced", code)
                    time.sleep(_CRASH_PAUSE_S)

    def _learn(self) -> None:
        """Imports what attempts had to import themselves: later ones find it there."""
        self._partial += os.read(self._report_read, 1 << 20)
        *lines, self._partial = self._partial.split(b"\n")
        self._preload({name for line in lines for name in json.loads(line)})

    def _preload(self, names: set[str]) -> None:
        new = names - self._preloaded
        if not new:
            return
        started = time.perf_counter()
        for name in sorted(new):
            with contextlib.suppress(BaseException):  # it stays the attempt's business, then
                importlib.import_module(name)
        self._preloaded |= new
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every page shared with children
        logger.info("preloaded %d modules in %.1f s", len(new), time.perf_counter() - started)

    def _scout(self) -> set[str]:
        """Imports the agent in a throw-away child to learn which packages it is made of."""
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            known = set(sys.modules)
            os.environ.setdefault("OPENAI_API_KEY", "none")  # clients made at import time want one
            with contextlib.suppress(BaseException):
                load_agent(self._config.agent)
            with contextlib.suppress(OSError), os.fdopen(write_fd, "w") as pipe:
                json.dump(third_party_modules(known), pipe)
            os._exit(0)
        os.close(write_fd)
        output = b""
        deadline = time.monotonic() + _SCOUT_PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            if select.select([read_fd], [], [], left)[0]:
                chunk = os.read(read_fd, 65536)
                if not chunk:
                    break
                output += chunk
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            return set(json.loads(output))
        except ValueError:
            return set()

    def _end_runners(self) -> None:
        for pid in self._runners:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_GRACE_S
        while self._runners and time.monotonic() < deadline:
            for pid in list(self._runners):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._runners.discard(pid)
            time.sleep(0.02)
        for pid in self._runners:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    Pool(RunnerConfig(**json.loads(os.environ.pop(SETTINGS)))).run()
