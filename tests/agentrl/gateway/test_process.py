"""The gateway process over the real engine: its refusals, its death, and its return."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from store_records import enqueue

from agentrl.config.commands import ServeConfig
from agentrl.config.settings.rollouts import RunnerSettings
from agentrl.gateway.handle import handed_over
from agentrl.gateway.process import GatewayPlan
from agentrl.samplers.embedded import EmbeddedSampler
from agentrl.supervisor import SupervisedProcess
from agentrl_proxy.sampler import DecodingParams, RefusedError
from agentrl_tracer.schemas import CallState, Claim, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.models.loading import load_base

OPERATOR_KEY = "sk-operator-key-of-the-test"

# The gateway's own process. Its engine fails once, while a file "fail" is there; and it is killed
# once, while a file "kill" is there, after an answer became durable and before its client got it.
FRAGILE = """
import os, signal, sys
from agentrl_proxy.requests.lifecycle import ClientRequest
from agentrl_trainer.inference.scheduler import Scheduler

def once(name):
    mark = os.path.join({folder!r}, name)
    if found := os.path.exists(mark):
        os.remove(mark)
    return found

work, commit = Scheduler.round, ClientRequest._commit

def fail_once(self):
    if self.busy and once("fail"):
        raise RuntimeError("CUDA error: device-side assert triggered")
    return work(self)

async def die_once(self, *args):
    await commit(self, *args)
    if once("kill"):
        os.kill(os.getpid(), signal.SIGKILL)

Scheduler.round, ClientRequest._commit = fail_once, die_once
from agentrl.gateway.process import main
main(sys.argv[1:])
"""


@pytest.fixture
def gateway(tmp_path: Path, store: Store) -> Iterator[tuple[str, Claim, SupervisedProcess]]:
    """A supervised gateway process over the tiny model, and one rollout."""
    run_id = store.create_run("test", "train", {})
    enqueue(store, run_id, {})
    claim = store.claim("runner", 600.0, run_id)
    assert claim is not None
    settings = ServeConfig.model_validate(
        {
            "model": {"device": "cpu", "dtype": "float32"},
            "sampler": {"max_tokens": 8, "kv_tokens": 5000},
        }
    )
    plan = GatewayPlan.of(
        settings, vllm_url=None, store=store.url, run_id=run_id,
        operator_key=OPERATOR_KEY,
        rollouts=RunnerSettings(max_calls_per_rollout=15),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as sock:
        command = [sys.executable, "-c", FRAGILE.format(folder=str(tmp_path)), str(sock.fileno())]
        log = tmp_path / "gateway.log"
        process = SupervisedProcess(
            "gateway", command, log, stdin=handed_over(plan), pass_fds=[sock.fileno()]
        )
        process.spawn().supervise()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", claim, process
        process.stop()


def test_a_gateway_that_dies_comes_back_and_samples_no_retry_again(
    gateway: tuple[str, Claim, SupervisedProcess], tmp_path: Path, store: Store
) -> None:
    """Its engine dies; then it is killed twice, and the SDK's own retry, that of a broken stream
    and one of long ago are answered from the store: each request has its one row."""
    url, claim, process = gateway
    base_url = f"{url}/rollouts/{claim.rollout_id}/v1"
    patient: Any = {"api_key": claim.key, "timeout": 90, "max_retries": 4}
    marked: Any = {"extra_headers": {"x-stainless-retry-count": "1"}}
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}
    with openai.OpenAI(base_url=base_url, **patient) as api:
        once = api.with_options(max_retries=0)
        chat = api.chat.completions.create
        legacy = partial(api.completions.create, model="m", prompt=["One", "Two"])
        earlier = legacy()
        first = httpx.get(f"{url}/healthz").json()
        (tmp_path / "fail").touch()
        with pytest.raises(openai.APIStatusError) as caught:
            once.chat.completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (503, "sampler_error")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        (tmp_path / "kill").touch()
        own = chat(**asked, n=2)  # held in the socket's backlog until a process answers
        second = httpx.get(f"{url}/healthz", timeout=30).json()
        assert (first["status"], second["status"]) == ("ok", "ok")
        assert first["boot_id"] != second["boot_id"]
        (tmp_path / "kill").touch()
        with pytest.raises(httpx.RemoteProtocolError):
            list(chat(**asked, stream=True))
        stream = list(chat(**asked, stream=True, **marked))
        assert process.restarts == 3
        assert legacy(**marked) == earlier
        assert chat(**asked, n=2).id != own.id  # unmarked: a sample of its own
        # The budget counts the calls of all four processes.
        with pytest.raises(openai.RateLimitError, match="has made 8 of its 15 calls"):
            once.chat.completions.create(**asked, n=8)
    as_operator = {"headers": {"authorization": f"Bearer {OPERATOR_KEY}"}, "timeout": 30}

    def sampler() -> dict[str, int]:
        return httpx.get(f"{url}/healthz", **as_operator).json()["sampler"]

    before = sampler()
    assert before["kv_budget"] == 5000
    httpx.post(f"{url}/admin/drop-prefixes", json={}, **as_operator).raise_for_status()
    assert sampler()["kv_tokens"] < before["kv_tokens"]
    process.stop()
    assert "the sampler has died" in (tmp_path / "gateway.log").read_text()
    calls = store.calls(attempt_ids=[claim.attempt_id])
    failed = calls.pop(2)
    assert (failed.state, failed.skip_reason) == (CallState.ERROR, SkipReason.SAMPLER_ERROR)
    ids = [call.response_id for call in calls[:-2]]
    assert ids == [earlier.id, earlier.id, own.id, own.id, stream[0].id]
    texts = [(c.response or {})["choices"][0]["message"]["content"] for c in calls[2:5]]
    assert [one.message.content for one in own.choices] == texts[:2]
    assert "".join(c.choices[0].delta.content or "" for c in stream) == texts[2]
    assert {(call.state, call.skip_reason) for call in calls} == {(CallState.COMPLETED, None)}
    assert store.accounting(claim.run_id).adds_up


async def test_refusals_of_the_engine() -> None:
    sampler = EmbeddedSampler(load_base("agentrl-tiny", device="cpu", dtype="float32"))
    sampler.start()

    async def sample(ids: list[int], **params: Any) -> None:
        async for _ in sampler.sample(ids, DecodingParams(**{"max_tokens": 2} | params), None):
            pass

    async def code(ids: list[int], **params: Any) -> str:
        with pytest.raises(RefusedError) as caught:
            await sample(ids, **params)
        return caught.value.code

    try:
        assert await code([]) == "invalid_parameter"
        assert await code([1], temperature=-1.0) == "invalid_parameter"
        assert await code([10**7]) == "invalid_parameter"
        for seed in (-1, 2**63, 2**64 - 1, -(2**63)):  # whatever JSON can say
            await sample([1], seed=seed, top_k=2**31 - 1)
    finally:
        await asyncio.to_thread(sampler.stop)
    started = time.monotonic()
    assert await code([1]) == "stopped"
    assert time.monotonic() - started < 1
