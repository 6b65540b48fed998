"""The process between the trainer and its pool, which alone holds the store.

The pool and its workers fork into agents, which inherit their memory and descriptors: with a store
of its own a worker would hand its password and its connection to every agent. So a worker asks
here, over a socket that its agents do not keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from agentrl.process_privacy import hide_memory
from agentrl.runner.protocol import RunnerConfig
from agentrl.supervisor import first_line
from agentrl_tracer.schemas import Attempt, AttemptState, Call, Claim

if TYPE_CHECKING:
    from agentrl_tracer.store import Store

_LAST_WORDS_S = 4.0  # for workers to write the ends of their attempts after their pool has ended


class StoreClient:
    """What a worker asks of the store, by its socket to the store's process.

    Every method raises OSError while the store is away (locked, restarting), and ConnectionError
    once its process is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock.detach())

    def claim(self, runner: str, lease_s: float, run_id: str) -> Claim | None:
        return self._ask("claim", runner, lease_s, run_id)

    def heartbeat(self, attempt_id: str, lease_s: float) -> bool:
        return self._ask("heartbeat", attempt_id, lease_s)

    def expire_leases(self) -> object:
        return self._ask("expire_leases")

    def end_attempt(
        self, attempt_id: str, state: AttemptState, *, error: str | None, log: str | None
    ) -> object:
        return self._ask("end_attempt", attempt_id, state, error, log)

    def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return self._ask("attempts", rollout_ids)

    def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        return self._ask("calls", attempt_ids)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self.connection.send_bytes(json.dumps([method, *arguments]).encode())
        try:
            failed, answer = self.connection.recv()
        except EOFError:
            raise ConnectionError("the process that holds the store has ended") from None
        if failed:
            raise OSError(answer)
        return answer


def sqlite_file(store: str) -> str:
    """Return the file of a store's URL or path; empty for a database server."""
    scheme, separator, rest = store.partition("://")
    if not separator:
        return store
    return rest.removeprefix("/").partition("?")[0] if scheme.startswith("sqlite") else ""


def main() -> None:
    """Start the pool, answer its workers, and end with it; the configuration is on stdin."""
    hide_memory()
    config = RunnerConfig.from_json(first_line(0))
    ours, theirs = socket.socketpair()
    pool = subprocess.Popen(
        [sys.executable, "-m", "agentrl.runner.pool", str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    signal.signal(signal.SIGTERM, lambda *_: pool.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    theirs.close()
    assert pool.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once
        for_pool = replace(config, store=sqlite_file(config.store))
        pool.stdin.write(for_pool.to_json().encode() + b"\n")
        pool.stdin.flush()
    serving: list[threading.Thread] = []
    _in_thread(_follow_trainer, pool.stdin.fileno())
    _in_thread(_take_workers, ours, config, serving)
    code = pool.wait()
    deadline = time.monotonic() + _LAST_WORDS_S
    for thread in serving:
        thread.join(max(0.0, deadline - time.monotonic()))
    os._exit(code if code >= 0 else 128 - code)


def _in_thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _follow_trainer(pool_stdin: int) -> None:
    """Close the pool's standard input when the trainer's end of ours is closed."""
    while os.read(0, 1024):
        pass
    os.close(pool_stdin)


def _take_workers(
    pool: socket.socket, config: RunnerConfig, serving: list[threading.Thread]
) -> None:
    """Serve each socket that the pool sends: one for every worker that it forks."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(pool, 1, 1)
        if not said:
            return
        for one in descriptors:
            serving.append(_in_thread(_serve, socket.socket(fileno=one), config))
        serving[:] = [thread for thread in serving if thread.is_alive()]


def _serve(worker: socket.socket, config: RunnerConfig) -> None:
    """Answer a worker until it ends."""
    with Connection(worker.detach()) as asking, contextlib.suppress(EOFError, ConnectionError):
        while True:
            # JSON, not pickles: an agent that reached the socket could not run code here.
            method, *arguments = json.loads(asking.recv_bytes())
            try:
                answer = False, _METHODS[method](_open_store(config.store, config.pool), *arguments)
            except Exception as error:  # the worker logs it, and asks again
                answer = True, " ".join(str(error).split())
            asking.send(answer)


_opening = threading.Lock()


def _open_store(url: str, pool: str) -> Store:
    with _opening:
        return _opened(url, pool)


@cache  # a store that cannot be opened raises, and is tried again
def _opened(url: str, pool: str) -> Store:
    from agentrl_tracer.store import Store  # takes as long as the pool's start, which is under way

    store = Store(url, patience_s=0)
    store.end_leases(pool)  # of a process before this one, which was killed with its workers
    return store


def _end_attempt(
    store: Store, attempt_id: str, state: str, error: str | None, log: str | None
) -> None:
    store.end_attempt(attempt_id, AttemptState(state), error=error, log=log)


_METHODS: dict[str, Callable[..., Any]] = {
    "claim": lambda store, *arguments: store.claim(*arguments),
    "heartbeat": lambda store, *arguments: store.heartbeat(*arguments),
    "expire_leases": lambda store: store.expire_leases(),
    "end_attempt": _end_attempt,
    "attempts": lambda store, ids: store.attempts(ids),
    "calls": lambda store, ids: store.calls(attempt_ids=ids, bodies=False),
}
