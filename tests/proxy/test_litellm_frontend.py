"""LiteLLM's real proxy in front of our gateway, in a virtual environment of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from official_clients import CALL, TOOLS, USER, streamed
from scripted_sampler import OPERATOR_KEY, Running

ROOT = Path(__file__).parents[2]
MASTER_KEY = "sk-litellm-master"
PYTHON = os.environ.get("AGENTRL_LITELLM_PROXY_PYTHON")

pytestmark = [
    pytest.mark.litellm_proxy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not PYTHON,
        reason="set AGENTRL_LITELLM_PROXY_PYTHON to the python of a virtual environment that has "
        "litellm[proxy]==1.105.3 (it cannot be installed beside CrewAI)",
    ),
]


@pytest.fixture
def front(gateway: Running, tmp_path: Path) -> Iterator[str]:
    """The proxy's URL; it serves examples/litellm_proxy/config.yaml."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "proxy"),
        "AGENTRL_GATEWAY_V1": f"{gateway.url}/v1",
        "AGENTRL_GATEWAY_KEY": OPERATOR_KEY,
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    assert PYTHON is not None
    log = tmp_path / "litellm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                str(Path(PYTHON).with_name("litellm")),
                "--config", str(ROOT / "examples/litellm_proxy/config.yaml"),
                "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False",
            ],
            stdout=out, stderr=out, env=env, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                if httpx.get(f"{url}/health/liveliness").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"LiteLLM's proxy did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_litellms_proxy_in_front(front: str, gateway: Running) -> None:
    """One test: the proxy takes long to start."""
    claim = gateway.claims[0]
    with openai.OpenAI(
        base_url=f"{front}/v1",
        api_key=MASTER_KEY,
        default_headers={"x-agentrl-key": claim.key, "x-agentrl-agent": "player"},
        max_retries=0,
        timeout=60,
    ) as api:
        whole = api.chat.completions.create(
            model="policy", messages=USER, seed=3, temperature=0.5, max_tokens=7
        )
        ids_of_whole(gateway, whole)
        ids_of_stream(gateway, api)
        tools(gateway, api)
        gateway.seal(claim)
        with pytest.raises(openai.APIStatusError) as sealed:
            api.chat.completions.create(model="policy", messages=USER)
        assert sealed.value.status_code == 400  # LiteLLM has no word for 409
        assert "this attempt is over" in str(sealed.value)
    assert [call.agent for call in gateway.calls(claim)] == ["player"] * 4
    with openai.OpenAI(base_url=f"{front}/v1", api_key=MASTER_KEY, max_retries=0) as api:
        api.chat.completions.create(model="policy", messages=USER)
    sums = gateway.store.accounting(gateway.run_id)
    assert sums.adds_up
    assert sums.skipped == {"no_rollout": 1}


def ids_of_whole(gateway: Running, whole: Any) -> None:
    [seen] = gateway.sampler.requests
    assert (seen.params.seed, seen.params.temperature, seen.params.max_tokens) == (3, 0.5, 7)
    fields = whole.choices[0].provider_specific_fields
    assert fields["prompt_token_ids"] == seen.prompt_ids
    assert fields["token_ids"] == seen.sampled[0]
    [call] = gateway.calls(gateway.claims[0])
    assert (call.prompt_ids, call.response_ids) == (seen.prompt_ids, seen.sampled[0])
    assert whole.choices[0].message.content == gateway.renderer.decode(seen.sampled[0])
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 7


def ids_of_stream(gateway: Running, api: openai.OpenAI) -> None:
    gateway.sampler.delay = 0.05
    with api.chat.completions.create(
        model="policy", messages=USER, seed=4, stream=True, stream_options={"include_usage": True}
    ) as stream:
        times: list[float] = []
        chunks: list[Any] = []
        for chunk in stream:
            times.append(time.monotonic())
            chunks.append(chunk)
    gateway.sampler.delay = 0
    seen = gateway.sampler.requests[-1]
    text, _, finish, usage = streamed(chunks)
    assert text == gateway.renderer.decode(seen.sampled[0])
    assert finish == "stop"
    assert usage.completion_tokens == len(seen.sampled[0])
    assert times[-1] - times[0] > 0.4
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    [fields] = filter(None, (getattr(d, "provider_specific_fields", None) for d in deltas))
    assert fields["prompt_token_ids"] == seen.prompt_ids
    assert fields["token_ids"] == seen.sampled[0]


def tools(gateway: Running, api: openai.OpenAI) -> None:
    gateway.sampler.script = lambda *_: f"Let me look.\n{CALL}"
    whole = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
    with api.chat.completions.create(
        model="policy", messages=USER, tools=TOOLS, stream=True
    ) as stream:
        text, calls, finish, _ = streamed(stream)
    message = whole.choices[0].message
    assert message.content == text == "Let me look."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == calls[0].function.name == "search"
    assert message.tool_calls[0].function.arguments == calls[0].function.arguments
    assert whole.choices[0].finish_reason == finish == "tool_calls"
