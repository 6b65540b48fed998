"""A running ``agentrl serve``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


class Served:
    """``agentrl serve`` with the model that ships, as a process; ``url`` answers once it is up."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.store = folder / "served.db"
        self.said = (folder / "said").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "serve", "--port", "0", "--device", "cpu",
             "--store", str(self.store), *arguments],
            stdout=subprocess.PIPE, stderr=self.said, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        found = None
        while found is None:
            line = self.process.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"http://[\d.]+:\d+", line)
        self.url = found[0]

    def gateway(self, other_than: int = 0) -> int:
        """The process id of the gateway, once there is one."""
        tasks, deadline = Path(f"/proc/{self.process.pid}/task"), time.monotonic() + 30
        while time.monotonic() < deadline:
            children = tasks.glob("*/children")  # of the thread that started it
            pids = {int(pid) for file in children for pid in file.read_text().split()}
            if pids - {other_than}:
                [pid] = pids - {other_than}
                return pid
            time.sleep(0.02)
        raise AssertionError("there is no gateway")

    def ask(self, **more: Any) -> httpx.Response:
        body = {"model": "agentrl-tiny", "messages": [{"role": "user", "content": "Who are you?"}]}
        body |= {"max_tokens": 8, **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(45)

    def all_said(self) -> str:
        self.said.seek(0)
        return self.said.read()

    def close(self) -> None:
        with self.process, self.said:
            self.process.kill()
