"""A server with several engines, and one that sleeps between requests."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import Server

from agentrl.samplers.vllm.sampler import VllmSampler
from agentrl_proxy.sampler import DecodingParams, RefusedError


def test_a_server_sleeps_until_it_is_asked(server: Server) -> None:
    sampler = VllmSampler(
        server.url, eos_ids=frozenset({2}), context_length=128, wait_s=10, sleeps=True
    )
    sampler.start()
    server.posted.clear()
    server.answers["/v1/completions"] = 500, {"error": {"message": "no"}}
    for _ in range(2):
        asyncio.run(sampler.drop_prefixes())
    with pytest.raises(RefusedError):
        asyncio.run(anext(sampler.sample([1, 2], DecodingParams(max_tokens=4), None)))
    asyncio.run(sampler.drop_prefixes())
    sampler.load_now("policy", 1, "/1")
    sampler.stop()
    asked = [path.rpartition("/")[2] for path, _ in server.posted]
    once = ["sleep?level=1", "wake_up"]
    assert asked[:6] == [*once, "completions", *once, "load_lora_adapter"]


def test_a_rollouts_requests_go_to_one_engine(server: Server) -> None:
    sampler = VllmSampler(
        server.url, eos_ids=frozenset({2}), context_length=128, wait_s=10, engines=4
    )
    sampler.start()
    server.posted.clear()
    server.answers["/v1/completions"] = 500, {"error": {"message": "no"}}

    async def ask(rollout: str | None) -> None:
        params = DecodingParams(max_tokens=4, rollout=rollout)
        with pytest.raises(RefusedError):
            await anext(sampler.sample([1, 2], params, None))

    for rollout in [None, *"abcdefgh", *"abcdefgh"]:
        asyncio.run(ask(rollout))
    sampler.stop()
    none, *engines = [engine for _, engine in server.posted]
    assert none is None
    assert engines[:8] == engines[8:]
    assert set(engines) <= {*"0123"}
    assert len(set(engines)) > 1
