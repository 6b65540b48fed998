"""The code blocks of the README and the tutorials run as printed.

The blocks of a page run in order, in one folder. A block with ``title="NAME"`` is written to that
file; any other Python block is a script; a shell block is run by bash. A line
``<!-- needs: SOMETHING -->`` before a block names what it needs that is not here, and the block
does not run. Each page's number of such blocks is known: see ``NEEDS``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Models as the pages print them, and the one that is here.
MODELS = {"Qwen/Qwen2.5-0.5B-Instruct": "agentrl-tiny"}

# What the blocks of each page need that is not here, and how many of them do.
NEEDS: dict[str, dict[str, int]] = {
    "README.md": {"an environment of its own": 2},
    "docs/rewards.md": {"a running rollout": 1},
    "docs/serving.md": {"llama.cpp and Ollama": 1},
    "docs/scale.md": {"a cluster": 4, "an environment of its own": 1},
    "docs/deploy.md": {"Docker": 3, "a cluster": 2},
    "docs/vllm.md": {"a GPU": 3},
    "docs/devices.md": {"a GPU": 1},
    "docs/install.md": {"an environment of its own": 1, "a GPU": 1},
    "docs/window.md": {"an environment of its own": 1},
    "docs/coding_agents.md": {"a coding agent": 1},
    "docs/coding_tasks.md": {"a coding agent": 1, "Harbor and Docker": 1},
} | {
    f"docs/{name}.md": {}
    for name in (
        *("tutorial", "runs", "adapters", "attribution", "client", "protocols", "sweeps"),
        *("multi-turn", "own-algorithms"),
        "before-rl",
    )
}

BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>.+?) -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>.+?)\")?\n"
    r"(?P<code>.*?)^```$",
    re.M | re.S,
)


class Block(NamedTuple):
    language: str
    code: str
    title: str | None
    needs: str | None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, with the models of ``MODELS`` replaced."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for printed, here in MODELS.items():
        text = text.replace(printed, here)
    return [Block(**found.groupdict()) for found in BLOCK.finditer(text)]


def run(block: Block, folder: Path, servers: list[subprocess.Popen[bytes]]) -> None:
    """Run one block; a shell block that serves goes on until the page is done."""
    if block.title:
        (folder / block.title).write_text(block.code, encoding="utf-8")
        return
    if block.language not in ("python", "bash"):
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    process = subprocess.Popen(
        program, cwd=folder, env=os.environ | {"PATH": path}, stdin=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin
    process.stdin.write(block.code.encode())
    process.stdin.close()
    if "agentrl serve" in block.code:
        servers.append(process)
        wait_for("http://127.0.0.1:8000/healthz", process)
        return
    try:
        assert process.wait(300) == 0, f"this block failed:\n{block.code}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the block left running
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the server ended before it answered")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(x, marks=pytest.mark.before_rl if "before-rl" in x else ()) for x in NEEDS],
)
def test_the_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    assert blocks
    assert Counter(block.needs for block in blocks if block.needs) == NEEDS[page]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for block in blocks:
            if not block.needs:
                run(block, tmp_path, servers)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def test_every_page_with_code_is_known() -> None:
    """A page of docs/ with code blocks either runs here or is made by a program."""
    generated = {"docs/settings.md", "docs/models.md"}
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - generated
    assert {page for page in pages if blocks_of(page)} <= set(NEEDS)
