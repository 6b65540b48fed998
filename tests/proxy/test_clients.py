"""Real clients, unmodified, in processes of their own: streams, tools, and exact tokens.

Some are not of this environment: those tests install them (``-m clients``) or are pointed at an
interpreter by an environment variable, and are skipped where that fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conversations import extends, one_by_one
from scripted_sampler import Running

from agentrl_tracer.schemas import Call, CallState

HERE = Path(__file__).parent / "clients"
CALL = (
    '<tool_call>\n{"arguments":  {"q":"köln \\u263a",   "n": 1.50}, "name":"search"}\n</tool_call>'
)
# With the arguments before the name nothing can be shown until the name is known.
NAMED = (
    '<tool_call>\n{"name":"search",  "arguments":  {"q":"köln \\u263a",   "n": 1.50}}\n</tool_call>'
)
SAID = [f"Let me look.\n{NAMED}", "It is at 50.9 N 👍", CALL, "Still."]
TOLD = {
    "texts": ["Let me look.", "It is at 50.9 N 👍", "", "Still."],
    "calls": [["search", {"q": "köln ☺", "n": 1.5}]] * 2,
}


def converse(
    gateway: Running, command: list[str], said: list[str] = SAID, cwd: Path | None = None
) -> tuple[dict[str, Any], list[Call]]:
    """What the client printed, and the calls recorded while it ran."""
    claim = gateway.claims[0]
    turns = iter(said)
    gateway.sampler.script = lambda *_: one_by_one(gateway.renderer, next(turns))
    # LiteLLM fetches a price list otherwise; CrewAI and LangChain report home.
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "LANGSMITH_TRACING": "false",
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [*command, gateway.base_url(claim), claim.key],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, **quiet},
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    calls = gateway.calls(claim)
    for call, seen in zip(calls, gateway.sampler.requests, strict=True):
        assert call.state is CallState.COMPLETED
        assert call.prompt_ids == seen.prompt_ids
        assert call.response_ids == seen.sampled[0]
    assert [call.response_ids for call in calls] == [one_by_one(gateway.renderer, s) for s in said]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]  # CrewAI adds boxes
    return json.loads(told[-1]), calls


def told_in_one_row(gateway: Running, command: list[str], cwd: Path | None = None) -> None:
    told, calls = converse(gateway, command, cwd=cwd)
    assert told.pop("pieces") == 1  # a call is shown when it is complete
    assert told == TOLD
    for earlier, later in pairwise(calls):
        assert extends(later, earlier)
        assert "branched" not in later.params


def python(client: str, interpreter: str = sys.executable) -> list[str]:
    return [interpreter, str(HERE / "python_clients.py"), client]


@pytest.mark.parametrize("client", ["openai_sync", "openai_async", "litellm", "langchain"])
def test_python_clients(gateway: Running, client: str) -> None:
    if client in ("litellm", "langchain"):
        package = {"litellm": "litellm", "langchain": "langchain_openai"}[client]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    told_in_one_row(gateway, python(client))


@pytest.mark.clients
@pytest.mark.timeout(400)
def test_openai_under_node(gateway: Running, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    (tmp_path / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@6"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    if made.returncode:
        pytest.skip(f"npm could not install openai: {made.stderr[-300:]}")
    command = ["node", str(HERE / "openai_client.mjs")]
    told_in_one_row(gateway, command, tmp_path)


@pytest.mark.clients
@pytest.mark.timeout(400)
@pytest.mark.parametrize("client", ["openai_sync", "openai_async"])
def test_openai_3(gateway: Running, openai3_python: str, client: str) -> None:
    told_in_one_row(gateway, python(client, openai3_python))


def test_crewai(gateway: Running) -> None:
    interpreter = os.environ.get("AGENTRL_TEST_CREWAI_PYTHON") or sys.executable
    if interpreter == sys.executable and importlib.util.find_spec("crewai") is None:
        pytest.skip("no crewai here, and AGENTRL_TEST_CREWAI_PYTHON names no interpreter with it")
    told, calls = converse(gateway, python("crewai", interpreter), [CALL, "Hi.", CALL, "Ho."])
    assert told["calls"] == TOLD["calls"]
    assert told["texts"] == ["50.9 N — grüße", "Hi.", "50.9 N — grüße", "Ho."]
    assert [bool(call.request and call.request.get("stream")) for call in calls] == [
        True, True, False, False,
    ]  # fmt: skip
