"""The load generator: a closed loop over keep-alive connections, in a process of its own.

    python load.py < cell.json        # prints what it measured as JSON

A bare asyncio protocol, because a client library costs several times what the servers do. Every
answer must be a 200 that is complete; the first one of every connection is read and compared
with the text that the mock is known to give. Anything else ends the cell with an error.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import processes
import uvloop

_QUIET_S = 5.0


@dataclass(frozen=True)
class Cell:
    port: int
    pid: int
    targets: list[tuple[str, str]]  # (path, key): a rollout's, or the one that all share
    per_target: int  # requests to a target before its connection takes the next
    connections: int
    stream: bool
    logprobs: bool
    seconds: float  # no request starts later than this
    at_most: int  # nor more requests than this; 0: no such limit
    warm_up: int
    text: str
    model: str


class Failed(Exception):
    pass


def requests(cell: Cell) -> Iterator[bytes]:
    """One connection's requests. Each asks something else, as agents do: nothing may be cached."""
    body: dict[str, Any] = {
        "model": cell.model,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Let's play a game. Say you are NNNNNN."}],
    }
    if cell.stream:
        body["stream"] = True
    if cell.logprobs:
        body["logprobs"] = True
    before, after = json.dumps(body).encode().split(b"NNNNNN")
    size = len(before) + 6 + len(after)
    for path, key in _targets_of(cell):
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{cell.port}\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {size}\r\naccept: */*\r\n\r\n"
        ).encode()
        for _ in range(cell.per_target):
            yield b"%b%b%06d%b" % (head, before, next(_number) % 1_000_000, after)


_number = itertools.count(1)
_turn = itertools.count()


def _targets_of(cell: Cell) -> Iterator[tuple[str, str]]:
    while True:
        yield cell.targets[next(_turn) % len(cell.targets)]


class Connection(asyncio.Protocol):
    """Sends a request, reads its answer to the end, tells the load."""

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self._load = load
        self._requests = requests(load.cell)
        self._checked = False
        self._busy = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted: int | None = None  # bytes in all; -1: chunked
        self._tail = b""
        self._busy = True
        request = next(self._requests)
        self._sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._wanted is None:
            self._parts.append(data)
            head, found, _ = b"".join(self._parts).partition(b"\r\n\r\n")
            self._size += len(data)
            if not found:
                return
            self._wanted = self._length(head)
        else:
            if not self._checked:
                self._parts.append(data)
            self._size += len(data)
        if self._wanted >= 0:
            over = self._size >= self._wanted
        else:
            self._tail = (self._tail + data[-64:])[-64:]
            over = self._tail.endswith(b"\r\n0\r\n\r\n")
        if over:
            self._answered()

    def _length(self, head: bytes) -> int:
        lines = head.lower().split(b"\r\n")
        if b" 200 " not in lines[0] + b" ":
            raise Failed(b"".join(self._parts)[:2000].decode("utf-8", "replace"))
        for line in lines[1:]:
            if line.startswith(b"content-length:"):
                return len(head) + 4 + int(line[15:])
        if b"transfer-encoding: chunked" not in lines:
            raise Failed(f"neither a length nor chunks: {head!r}")
        return -1

    def _answered(self) -> None:
        now = time.perf_counter()
        if self._load.cell.stream and b"data: [DONE]" not in self._tail:
            raise Failed(f"the stream did not end with [DONE]: {self._tail!r}")
        self._busy = False
        if not self._checked:
            self._load.check(b"".join(self._parts))
            self._checked = True
        self._load.answered(self, now - self._sent_at)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._load.fail(Failed(f"the server closed a connection before it answered: {exc}"))


class Load:
    """All connections of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.total = 0  # answers, the warm-up's too
        self.logprobs_seen = 0
        self.chunks_seen = 0
        self._latencies: list[float] = []
        self._may_send = 0
        self._until = 0.0
        self._under_way = 0
        self._over: asyncio.Future[None]

    async def run(self) -> dict[str, Any]:
        cell, loop = self.cell, asyncio.get_running_loop()
        self._over = loop.create_future()
        loop.set_exception_handler(lambda _, context: self.fail(context.get("exception")))
        connections = [
            (await loop.create_connection(lambda: Connection(self), "127.0.0.1", cell.port))[1]
            for _ in range(cell.connections)
        ]
        await self._round(connections, 60.0, cell.warm_up)
        pids = processes.tree(cell.pid)
        cpu = processes.when_quiet(pids, _QUIET_S)
        self._latencies = []
        own_cpu, started = time.process_time(), time.perf_counter()
        await self._round(connections, cell.seconds, cell.at_most)
        ended = time.perf_counter()
        own_cpu = time.process_time() - own_cpu
        cpu = processes.when_quiet(pids, _QUIET_S) - cpu
        for connection in connections:
            connection.transport.close()
        latencies = sorted(self._latencies)
        count = len(latencies)
        return {
            "answered": count,
            "total": self.total,
            "seconds": ended - started,
            "per_second": count / (ended - started),
            "cpu_ms": 1e3 * cpu / count,
            "own_cpu_ms": 1e3 * own_cpu / count,
            "p50_ms": 1e3 * latencies[count // 2],
            "p99_ms": 1e3 * latencies[min(count - 1, count * 99 // 100)],
            "logprobs_seen": self.logprobs_seen,
            "chunks_seen": self.chunks_seen,
        }

    async def _round(self, connections: list[Connection], seconds: float, at_most: int) -> None:
        """Requests until the time or the number is used up; returns when all are answered."""
        self._may_send = at_most or sys.maxsize
        self._until = time.perf_counter() + seconds
        self._over = asyncio.get_running_loop().create_future()
        for connection in connections:
            if self._may_send:
                self._may_send -= 1
                self._under_way += 1
                connection.send()
        await self._over

    def answered(self, connection: Connection, seconds: float) -> None:
        self.total += 1
        self._latencies.append(seconds)
        if self._may_send and time.perf_counter() < self._until:
            self._may_send -= 1
            connection.send()
            return
        self._under_way -= 1
        if not self._under_way and not self._over.done():
            self._over.set_result(None)

    def check(self, raw: bytes) -> None:
        """Reads a whole answer: it must say what the mock said."""
        body = _body(raw)
        if self.cell.stream:
            lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
            chunks = [json.loads(line) for line in lines if line.strip() != b"[DONE]"]
            choices = [c["choices"][0] for c in chunks if c.get("choices")]
            text = "".join(c["delta"].get("content") or "" for c in choices)
        else:
            chunks = [json.loads(body)]
            choices = chunks[0]["choices"]
            text = choices[0]["message"]["content"]
        if text != self.cell.text:
            raise Failed(f"another answer than the mock's: {text!r}\n{body[:3000]!r}")
        self.chunks_seen = len(chunks)
        self.logprobs_seen = sum(
            len((c.get("logprobs") or {}).get("content") or ()) for c in choices
        )

    def fail(self, error: BaseException | None) -> None:
        if not self._over.done():
            self._over.set_exception(error or Failed("unknown"))


def _body(raw: bytes) -> bytes:
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(parts)


def main() -> None:
    cell = Cell(**json.load(sys.stdin))
    gc.disable()  # a pause here would read as the server's
    try:
        print(json.dumps(uvloop.run(Load(cell).run())))
    except Failed as error:
        raise SystemExit(f"the cell failed: {error}") from None


if __name__ == "__main__":
    main()
