"""Answers that did not come through in the agent's process, though the gateway gave them away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripted_sampler import Running

from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import CallState

CLIENTS = Path(__file__).parent / "clients"


def test_what_raised_or_was_canceled_in_the_agent_is_undelivered(
    gateway: Running, tmp_path: Path
) -> None:
    [claim] = gateway.new_claims()

    def script(prompt: list[int], *_: Any) -> str:
        # Long enough to be under way when the agent stops reading, and short enough to end then.
        canceled = "canceled" in gateway.renderer.decode(prompt)
        gateway.sampler.delay = 0.2 if canceled else 0.0
        return "one two three four five six"

    gateway.sampler.script = script
    config = RunnerConfig(
        store="", gateways=[gateway.url], run_id="", model="policy", logs=str(tmp_path), runners=1,
        timeout_s=60.0, lease_s=15.0, agent=f"{CLIENTS / 'gives_up.py'}:run",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(CLIENTS / "attempt.py"), config.to_json(), json.dumps(asdict(claim))],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "OPENAI_BASE_URL": gateway.base_url(claim)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["state"] == "succeeded", done.stderr
    found = {
        call.request["messages"][0]["content"]: call
        for call in gateway.calls(claim)
        if call.request is not None
    }
    came = {name for name, call in found.items() if call.state is CallState.COMPLETED}
    gave_up = {name for name in found if name.endswith(("raised", "canceled"))}
    assert len(gave_up) == 8
    assert came == found.keys() - gave_up
    for name in gave_up:
        assert found[name].state is CallState.CANCELLED
        assert found[name].params["undelivered"], f"{name}: seen by the gateway alone"
    assert gateway.store.accounting(gateway.run_id).adds_up
