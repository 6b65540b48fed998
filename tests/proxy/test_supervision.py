"""The gateway process over the real engine: its refusals, its death, and its return."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentrl_proxy.sampler import ContextLengthError, DecodingParams, RefusedError
from agentrl_tracer.schemas import Call, CallState, Claim, NewRollout, Purpose, SkipReason
from agentrl_tracer.store import Store

WEIGHTS = Path(__file__).parents[2] / "trainer/agentrl_trainer/tiny/weights"
ASKED: list[Any] = [{"role": "user", "content": "Who are you?"}]

# The gateway's own process, whose engine fails while a file is there: once, as it takes it away.
FRAGILE = """
import os, sys
from agentrl_trainer.inference.scheduler import Scheduler

work = Scheduler.round

def fail_once(self):
    if self.busy and os.path.exists({mark!r}):
        os.remove({mark!r})
        raise RuntimeError("CUDA error: device-side assert triggered")
    return work(self)

Scheduler.round = fail_once
from agentrl.gateway.process import main
main(sys.argv[1:])
"""


@contextlib.contextmanager
def real_gateway(
    tmp_path: Path, script: str, **settings: Any
) -> Iterator[tuple[str, Claim, Store, Any]]:
    """A supervised gateway process over the tiny model, and one rollout: url, claim, store."""
    gateway = pytest.importorskip("agentrl.gateway.process")
    supervisor = pytest.importorskip("agentrl.supervisor")
    store = Store(str(tmp_path / "trace.db"))
    run_id = store.create_run("test", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    store.enqueue(run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, 0, seed=1)])
    claim = store.claim("runner", 600.0, run_id)
    assert claim is not None
    made = gateway.GatewaySettings(
        store=store.url, model="agentrl-tiny", adapter=None, device="cpu", dtype="float32",
        operator_key="sk-operator-key-of-the-test", run_id=run_id, max_tokens=8, **settings,
    )  # fmt: skip
    with contextlib.closing(store), socket.create_server(("127.0.0.1", 0)) as sock:
        process = supervisor.SupervisedProcess(
            "gateway",
            [sys.executable, "-c", script, str(sock.fileno())],
            tmp_path / "gateway.log",
            env={"AGENTRL_GATEWAY_SETTINGS": json.dumps(asdict(made))},
            pass_fds=[sock.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", claim, store, process
        finally:
            process.stop()


def test_an_engine_that_dies_comes_back(tmp_path: Path) -> None:
    mark = tmp_path / "fail"
    script = FRAGILE.format(mark=str(mark))
    with real_gateway(tmp_path, script, max_calls_per_rollout=3) as (url, claim, store, process):
        base_url = f"{url}/rollouts/{claim.rollout_id}/v1"
        with openai.OpenAI(base_url=base_url, api_key=claim.key, timeout=90) as api:
            once = api.with_options(max_retries=0)
            once.chat.completions.create(model="m", messages=ASKED)
            first = httpx.get(f"{url}/healthz").json()
            mark.touch()
            with pytest.raises(openai.APIStatusError) as caught:
                once.chat.completions.create(model="m", messages=ASKED)
            assert caught.value.status_code == 503
            assert caught.value.code == "sampler_error"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            # Held in the socket's backlog until the next process answers.
            api.with_options(max_retries=3).chat.completions.create(model="m", messages=ASKED)
            second = httpx.get(f"{url}/healthz", timeout=30).json()
            assert (first["status"], second["status"]) == ("ok", "ok")
            assert first["boot_id"] != second["boot_id"]
            assert process.restarts == 1
            # Three calls, over two processes: the budget is used up.
            with pytest.raises(openai.RateLimitError, match="max_calls_per_rollout"):
                once.chat.completions.create(model="m", messages=ASKED)
        process.stop()
        assert "the sampler has died" in (tmp_path / "gateway.log").read_text()
        calls = store.calls(attempt_ids=[claim.attempt_id])
        assert [(call.state, call.skip_reason) for call in calls] == [
            (CallState.COMPLETED, None),
            (CallState.ERROR, SkipReason.SAMPLER_ERROR),
            (CallState.COMPLETED, None),
        ]
        assert store.accounting(claim.run_id).adds_up


# The gateway's own process, which dies once, while a file is there: after an answer became durable
# and before its client got it.
KILLED = """
import os, signal, sys
from agentrl_proxy.requests.lifecycle import ClientRequest

commit = ClientRequest._commit

async def die_once(self, *args):
    await commit(self, *args)
    if os.path.exists({mark!r}):
        os.remove({mark!r})
        os.kill(os.getpid(), signal.SIGKILL)

ClientRequest._commit = die_once
from agentrl.gateway.process import main
main(sys.argv[1:])
"""


def test_a_retry_after_a_kill_is_not_sampled_again(tmp_path: Path) -> None:
    """The SDK's own, that of a broken stream, and one of long ago: each request has its one row."""
    mark = tmp_path / "kill"
    with real_gateway(tmp_path, KILLED.format(mark=str(mark))) as (url, claim, store, process):
        base_url = f"{url}/rollouts/{claim.rollout_id}/v1"
        patient: Any = {"api_key": claim.key, "timeout": 90, "max_retries": 4}
        marked: Any = {"extra_headers": {"x-stainless-retry-count": "1"}}
        asked: Any = {"model": "m", "messages": ASKED}
        with openai.OpenAI(base_url=base_url, **patient) as api:
            chat = api.chat.completions.create
            legacy = partial(api.completions.create, model="m", prompt=["One", "Two"])
            earlier = legacy()
            mark.touch()
            own = chat(**asked, n=2)
            mark.touch()
            with pytest.raises(httpx.RemoteProtocolError):
                list(chat(**asked, stream=True))
            stream = list(chat(**asked, stream=True, **marked))
            assert process.restarts == 2
            assert legacy(**marked) == earlier
            assert chat(**asked, n=2).id != own.id  # unmarked: a sample of its own
        process.stop()
        calls = store.calls(attempt_ids=[claim.attempt_id])
        ids = [call.response_id for call in calls[:-2]]
        assert ids == [earlier.id, earlier.id, own.id, own.id, stream[0].id]
        texts = [api_text(call) for call in calls[2:5]]
        assert [one.message.content for one in own.choices] == texts[:2]
        assert "".join(c.choices[0].delta.content or "" for c in stream) == texts[2]
        assert {(call.state, call.skip_reason) for call in calls} == {(CallState.COMPLETED, None)}
        assert store.accounting(claim.run_id).adds_up


def api_text(call: Call) -> str:
    """What the wire response of a chat call says."""
    assert call.response is not None
    return call.response["choices"][0]["message"]["content"]


async def test_refusals_of_the_engine() -> None:
    embedded = pytest.importorskip("agentrl.samplers.embedded")
    model = pytest.importorskip("agentrl_trainer.models.loading")
    base = model.load_base(str(WEIGHTS), device="cpu", dtype="float32")
    sampler = embedded.EmbeddedSampler(base)
    sampler.start()

    async def sample(ids: list[int], adapter: str | None = None, **params: Any) -> None:
        fields: dict[str, Any] = {"max_tokens": 2} | params
        async for _ in sampler.sample(ids, DecodingParams(**fields), adapter):
            pass

    async def code(*args: Any, **params: Any) -> str:
        with pytest.raises(RefusedError) as caught:
            await sample(*args, **params)
        return caught.value.code

    try:
        assert await code([]) == "invalid_parameter"
        assert await code([1], temperature=-1.0) == "invalid_parameter"
        assert await code([10**7]) == "invalid_parameter"
        assert await code([1], "nobody") == "unknown_adapter"
        with pytest.raises(ContextLengthError):
            await sample([1] * (base.context_length + 1))
        for seed in (-1, 2**63, 2**64 - 1, -(2**63)):  # whatever JSON can say
            await sample([1], seed=seed, top_k=2**63)
    finally:
        await asyncio.to_thread(sampler.stop)
    started = time.monotonic()
    assert await code([1]) == "stopped"
    assert time.monotonic() - started < 1
