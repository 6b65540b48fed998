"""The gateway over each real sampler and the tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai

from agentrl_proxy.app import create_app
from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.uvicorn import serving
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter


def test_chat_over_a_sampler(tmp_path: Path, tiny_sampler: Any, renderer: Renderer) -> None:
    store = Store(str(tmp_path / "trace.db"))
    run_id = store.create_run("test", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, 0, seed=1)])
    claim = store.claim("runner", 600.0, run_id)
    assert claim is not None
    store.register_gateway("boot", run_id, 1)
    writer = TraceWriter(store, "boot")
    deps = GatewayDependencies(
        tiny_sampler, renderer, store, writer, "boot",
        operator_key="k", run_id=run_id, context_length=tiny_sampler.context_length,
        defaults={"max_tokens": 24},
    )  # fmt: skip
    try:
        with (
            serving(create_app(deps)) as url,
            openai.OpenAI(
                base_url=f"{url}/rollouts/{claim.rollout_id}/v1", api_key=claim.key, max_retries=0
            ) as api,
        ):
            _converse(api)
    finally:
        writer.close()
    calls = store.calls(attempt_ids=[claim.attempt_id])
    assert calls[0].response_ids == calls[1].response_ids  # one seed, streamed or not
    for call in calls:
        assert call.response_ids
        assert len(call.response_ids) == len(call.response_logprobs)
        assert all(math.isfinite(p) and p <= 0 for p in call.response_logprobs)
    known = calls[0].prompt_ids + calls[0].response_ids
    assert calls[2].prompt_ids[: len(known)] == known
    assert [call.state for call in calls] == ["completed"] * 4
    assert store.accounting(run_id).adds_up
    store.close()


def _converse(api: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Who are you?"}]
    answer = api.chat.completions.create(model="m", messages=asked, seed=7)
    chunks = api.chat.completions.create(model="m", messages=asked, seed=7, stream=True)
    said = answer.choices[0].message.content
    assert said
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
    more = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    api.chat.completions.create(model="m", messages=more, seed=7)
    stop = said[len(said) // 2]
    cut = api.chat.completions.create(model="m", messages=asked, seed=7, stop=stop)
    assert cut.choices[0].message.content == said[: said.index(stop)]
