"""``VllmSampler`` when its server comes and goes. Real deaths are in ``test_server.py``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from fake_gateway import until
from fake_vllm import CHOICE, Server
from safetensors.numpy import save
from settings import nested

from agentrl import timing
from agentrl.config.commands import ServeConfig, TrainConfig
from agentrl.gateway import handle
from agentrl.gateway.handle import GatewayHandle
from agentrl.gateway.process import GatewayPlan
from agentrl.runs.folder import RunFolder
from agentrl.samplers.vllm import adapters, api, recovery
from agentrl.samplers.vllm import sampler as vllm_sampler
from agentrl.samplers.vllm.api import VllmError
from agentrl.samplers.vllm.sampler import VllmSampler
from agentrl.training import session
from agentrl_proxy.sampler import DecodingParams, RefusedError

FILES = ("adapter_config.json", "adapter_model.safetensors")
RANK = "Worker failed with error 'LoRA rank 32 is greater than max_lora_rank 16.'"


@pytest.fixture
def sampler(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmSampler]:
    monkeypatch.setattr(recovery, "_POLL_S", 0.02)
    sampler = VllmSampler(f"{server.url}/v1", eos_ids=frozenset({2}), context_length=128, wait_s=10)
    sampler.start()
    yield sampler
    server.silent = False
    server.released.set()
    sampler.stop()
    assert server.loras == {}


async def answer(sampler: VllmSampler, grammar: str | None = None) -> None:
    params = DecodingParams(max_tokens=4, grammar=grammar)
    async for _ in sampler.sample([1, 2], params, "policy"):
        pass


def test_a_new_server_gets_every_adapter_under_new_names(
    server: Server, sampler: VllmSampler
) -> None:
    sampler.load_now("asker", 3, "/asker/3")
    sampler.load_now("answerer", 4, "/answerer/4")
    before = dict(server.loras)
    server.loras = {}  # it was started anew
    until(lambda: sampler.stats()["recoveries"] > 0 and sampler.healthy)
    assert sorted(server.loras.values()) == ["/answerer/4", "/asker/3"]
    assert not before.keys() & server.loras.keys()
    assert sampler.adapters == {"asker": 3, "answerer": 4}
    assert sampler.context_length == 64


def test_a_server_without_an_engine_is_unhealthy_until_it_has_one(
    server: Server, sampler: VllmSampler
) -> None:
    sampler.load_now("policy", 0, "/0")
    server.well = False
    until(lambda: not sampler.healthy)
    with pytest.raises(RefusedError, match="/health answers 503") as refused:
        asyncio.run(sampler.load_adapter("policy", 1, "/1"))
    assert refused.value.code == "deferred"
    server.loras, looks = {}, server.looks
    until(lambda: server.looks > looks + 2)
    assert not sampler.healthy
    server.well = True
    until(lambda: sampler.healthy)
    assert list(server.loras.values()) == ["/1"]  # the version that was published meanwhile
    assert sampler.adapters == {"policy": 1}


def test_a_few_replaced_versions_stay_for_their_answers(
    server: Server, sampler: VllmSampler
) -> None:
    for version in range(6):
        sampler.load_now("policy", version, f"/{version}")
        sampler.load_now("other", version, f"/other/{version}")
    kept = [path for path in server.loras.values() if "other" not in path]
    assert kept == ["/2", "/3", "/4", "/5"]
    assert len(server.loras) == 8


def test_a_version_published_during_recovery_wins(
    server: Server, sampler: VllmSampler, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch loads the old version anew; before that is done, the new one is there."""
    sampler.load_now("policy", 1, "/1")
    server.while_loading = lambda: sampler.load_now("policy", 2, "/2")
    server.loras = {}
    until(lambda: sampler.stats()["recoveries"] > 0 and sampler.healthy)
    assert sampler.adapters == {"policy": 2}
    assert list(server.loras.values()) == ["/2"]
    assert "does not list" not in caplog.text  # it does


def test_an_adapter_that_is_gone_is_the_servers_fault(server: Server, sampler: VllmSampler) -> None:
    """Between a server's start and our noticing, it knows no adapter: agents must ask again."""
    sampler.load_now("policy", 1, "/1")
    sampler._watch.stop()
    assert sampler.healthy
    server.loras = {}

    with pytest.raises(RefusedError) as refused:
        asyncio.run(answer(sampler))
    assert refused.value.code == "stopped"


def test_its_client_ends_with_its_event_loop(sampler: VllmSampler) -> None:
    async def connected() -> Any:
        await sampler.load_adapter("policy", 1, "/1")
        return await sampler._client.connection()

    first, second = asyncio.run(connected()), asyncio.run(connected())
    assert first.is_closed
    assert second.is_closed
    assert first is not second


@pytest.mark.parametrize("grammar", [None, 'start: "a"'])
@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ({"well": False}, "/health answers 503"),
        ({"silent": True}, "it has not answered"),
        ({"loras": {}}, "it has lost its adapters"),
    ],
)
def test_answers_under_way_end_with_a_server_that_leaves_its_sockets_open(
    server: Server,
    sampler: VllmSampler,
    monkeypatch: pytest.MonkeyPatch,
    loss: dict[str, Any],
    why: str,
    grammar: str | None,
) -> None:
    sampler.load_now("policy", 1, "/1")
    monkeypatch.setattr(recovery, "REQUEST_S", 0.2)

    async def lose() -> None:
        asked = (answer(sampler, grammar) for _ in range(3))
        answers = asyncio.gather(*asked, return_exceptions=True)
        for _ in range(3):
            assert await asyncio.to_thread(server.under_way.acquire, timeout=20)
        assert not answers.done()
        for name, value in loss.items():
            setattr(server, name, value)
        if "silent" in loss:
            monkeypatch.setattr(api, "_SILENCE_S", 1.0)
        for error in await asyncio.wait_for(answers, 20):
            assert isinstance(error, RefusedError)
            assert (error.code, why in str(error)) == ("stopped", True), error
        assert sampler.stats()["in_flight"] == 0
        if "loras" not in loss:  # it is not back at once
            with pytest.raises(RefusedError, match=why):
                await answer(sampler)

    asyncio.run(lose())


def test_a_load_that_took_too_long_is_unloaded(
    server: Server, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_LOAD_S", 0.2)
    go_on = threading.Event()
    server.while_loading = go_on.wait
    with pytest.raises(RefusedError, match="ReadTimeout") as refused:
        sampler.load_now("policy", 1, "/late")
    assert refused.value.code == "stopped"
    monkeypatch.setattr(adapters, "_LOAD_S", 10)
    go_on.set()
    sampler.load_now("policy", 1, "/again")
    until(lambda: list(server.loras.values()) == ["/again"])


def test_a_gateway_that_starts_waits_for_files_that_the_server_does_not_see_yet(
    server: Server, sampler: VllmSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows them late; what never fits is refused at once."""
    server.wants_files = True
    late = tmp_path / "late"
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(sampler.load_now, "policy", 1, str(late))
        until(lambda: loading.done() or server.loads >= 2)
        late.mkdir()
        config, loads = late / "adapter_config.json", server.loads
        config.write_text('{"r": 8, "targ')
        until(lambda: loading.done() or server.loads >= loads + 2)
        config.write_text('{"r": 8}')
        loading.result(10)
    assert list(server.loras.values()) == [str(late)]

    monkeypatch.setattr(vllm_sampler, "FILES_S", 0.1)
    with pytest.raises(RefusedError, match=r"No adapter found.*under this very path") as refused:
        sampler.load_now("policy", 2, str(tmp_path / "never"))
    assert refused.value.code == "files_not_found"
    config.write_text('{"r": 8, "targ')
    half = r"/late.*adapter_config\.json is not whole .*: Unterminated string"
    with pytest.raises(RefusedError, match=half) as refused:
        sampler.load_now("policy", 2, str(late))
    assert refused.value.code == "files_not_found"
    config.write_text('{"r": 8}')

    server.refusal, loads = (500, RANK), server.loads
    with pytest.raises(RefusedError, match="max_lora_rank") as refused:
        sampler.load_now("policy", 2, str(late))
    assert (refused.value.code, server.loads) == ("invalid_parameter", loads + 1)


def test_a_server_that_does_not_list_what_it_loads_is_asked_once_a_round(
    server: Server, sampler: VllmSampler
) -> None:
    """As where several processes share a URL, each with adapters of its own."""
    sampler.load_now("policy", 1, "/1")
    server.lists = False
    until(lambda: "does not list what it loaded" in sampler._client.trouble)
    until(lambda: server.loads >= 8)
    assert server.loads <= server.looks
    assert len(server.loras) <= 1
    assert (sampler.healthy, sampler.stats()["recoveries"]) == (False, 0)
    server.lists = True
    until(lambda: sampler.healthy)
    assert sampler.stats()["recoveries"] == 1
    assert list(server.loras.values()) == ["/1"]


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of pytest would write its log where pytest captures it."""
    monkeypatch.setattr(handle, "_may_fork", lambda: False)


def session_with(folder: Path, url: str, **settings: Any) -> session.Session:
    config = TrainConfig(
        **nested(
            agent="agents:mixed", tasks=folder / "tasks.jsonl", sampler="vllm", vllm_url=url,
            device="cpu", runners=1, **settings,
        )
    )  # fmt: skip
    return session.Session(RunFolder(folder / "run"), config, "train")


def test_a_publication_that_is_refused_for_good_ends_the_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fork: None
) -> None:
    """In trouble, or where files are not seen yet, it waits and says so; a refusal is an error."""
    monkeypatch.setattr(timing, "FIRST_NOTICE_S", 1.0)
    monkeypatch.setitem(session._REFUSED_S, "unfit", 0.5)
    told: list[str] = []

    def on_trouble(message: str) -> None:
        told.append(message)
        server.refusal = (500, RANK)

    with session_with(tmp_path, server.url) as running:
        running.wait_ready(print)
        server.wants_files, late = True, tmp_path / "late"
        late.mkdir()
        config = late / "adapter_config.json"
        running.publish("policy", 0, str(late), 0, lambda _: config.write_text("{}"))
        assert [*server.loras.values()] == [str(late)]
        server.wants_files, server.refusal, server.loads = False, (500, "out of memory"), 0
        with pytest.raises(session.RunError) as refused:
            running.publish("policy", 1, "/adapters/1", 1, on_trouble)
    assert len(told) == 1
    assert "policy@1 is not published yet" in told[0]
    assert "out of memory" in told[0]
    for part in ("policy@1 cannot be published", RANK, "--max-lora-rank", "/adapters/1"):
        assert part in str(refused.value)
    assert server.loads < 20  # not one each 30 ms


def test_a_publication_whose_files_stay_half_written_ends_the_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fork: None
) -> None:
    monkeypatch.setitem(session._REFUSED_S, "files_not_found", 0.2)
    config, tensors = b'{"r": 8}', save({"lora_A": numpy.ones((8, 64), "float32")})
    halves = [(config[:0], tensors), (config[:5], tensors)]
    halves += [(config, tensors[:cut]) for cut in (0, 5, 20, len(tensors) - 1)]
    server.wants_files, adapter = True, tmp_path / "half"
    adapter.mkdir()
    with session_with(tmp_path, server.url) as running:
        running.wait_ready(print)
        for half in halves:
            for file, content in zip(FILES, half, strict=True):
                (adapter / file).write_bytes(content)
            cut = FILES[half[0] == config]
            with pytest.raises(session.RunError) as refused:
                running.publish("policy", 1, str(adapter), 1, print)
            assert f"/half (500): {cut} is not whole where" in str(refused.value)
            assert "actimeo=1" in str(refused.value)
    assert server.loras == {}


def test_a_version_is_published_though_one_of_two_servers_is_lost(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fork: None
) -> None:
    """Its gateway is unwell, so other gateways get its rollouts; it comes back with the version.

    One that was never there joins likewise."""
    with Server() as other:
        serving = threading.Thread(target=other.serve_forever, args=(0.01,))
        serving.start()
        other.well = False
        with session_with(tmp_path, f"{other.url},{server.url}", vllm_wait=1) as running:
            told: list[str] = []
            assert "sampler" in running.wait_ready(told.append)
            late = f"no vLLM server is ready at {other.url} after 1 s (sampler.vllm.wait)"
            assert any(late in said for said in told)
            running.publish("policy", 1, "/1", 1, print)
            assert [*server.loras.values(), *other.loras.values()] == ["/1"]
            other.well = True
            until(lambda: None not in running.gateways.healths())
            assert [*server.loras.values(), *other.loras.values()] == ["/1", "/1"]
            other.well = False
            until(lambda: None in running.gateways.healths())
            told.clear()
            running.publish("policy", 2, "/2", 2, told.append)
            assert [*server.loras.values()] == ["/1", "/2"]
            assert len(told) == 1
            assert "policy@2 is published; a gateway without a sampler follows: vLLM is" in told[0]
            other.loras, other.well = {}, True  # it was started anew
            until(lambda: None not in running.gateways.healths())
            assert list(other.loras.values()) == ["/2"]
            versions = [(one or {})["adapters"] for one in running.gateways.healths()]
            assert versions == [{"policy": 2}] * 2
            # It is well, and fails to load: the publication waits for it alone.
            other.refusal = (500, "out of memory")
            monkeypatch.setattr(timing, "FIRST_NOTICE_S", 0.5)

            def on_trouble(message: str) -> None:
                assert "out of memory" in message
                other.refusal = None

            loads = server.loads
            running.publish("policy", 3, "/3", 3, on_trouble)
            assert (server.loads, other.refusal) == (loads + 1, None)
            assert "/3" in other.loras.values()
        other.shutdown()
        serving.join()


@pytest.fixture
def nowhere() -> str:
    """A URL at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_server_that_is_not_there_is_waited_for_no_longer_than_asked(
    nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = VllmSampler(nowhere, eos_ids=frozenset({2}), context_length=128, wait_s=1.5)
    with pytest.raises(
        VllmError, match=r"sampler\.vllm\.url: .* refused.*sampler\.vllm\.wait is 1\.5 s"
    ):
        sampler.start()
    [said] = [record.message for record in caplog.records]
    assert said.startswith(f"no vLLM server is ready at {nowhere}: ")
    assert said.endswith("waiting for it up to 1.5 s (sampler.vllm.wait)")


def test_a_gateway_that_takes_over_waits_for_the_server_without_end(tmp_path: Path) -> None:
    """``vllm_wait`` is for a server that was never there; an outage may be longer."""
    listening = socket.create_server(("127.0.0.1", 0))
    given = ServeConfig.model_validate(
        {"sampler": {"kind": "vllm", "vllm": {"url": "http://127.0.0.1:1", "wait": 7.5}}}
    )
    plan = GatewayPlan.of(given, vllm_url=None, store=str(tmp_path / "store.db"))
    assert plan.vllm_wait == 7.5
    gateway = GatewayHandle(plan, tmp_path / "gateway.log", listening)
    gateway.start()
    try:
        killed = gateway.pid
        os.kill(killed, signal.SIGKILL)
        until(lambda: gateway.pid != killed, 30)
        assert json.loads(gateway.stdin)["plan"]["vllm_wait"] is None
    finally:
        gateway.stop()


def test_a_server_that_comes_up_late_joins_with_its_adapters(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_POLL_S", 0.02)
    server.well = False
    sampler = VllmSampler(
        server.url, eos_ids=frozenset({2}), context_length=128, wait_s=0.1, joins_late=True
    )
    sampler.start()
    sampler.load_now("policy", 1, "/1")
    assert (sampler.healthy, server.loads) == (False, 0)
    server.well = True
    until(lambda: sampler.healthy)
    assert (list(server.loras.values()), sampler.adapters) == (["/1"], {"policy": 1})
    sampler.stop()


@pytest.mark.parametrize(
    ("count", "why"),
    [(1, r"sampler\.vllm\.wait is 4 s"), (2, r"no vLLM server is ready at http://\S+ after 4 s")],
)
def test_a_run_says_what_it_waits_for_and_ends_without_it(
    nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fork: None, count: int,
    why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(timing, "FIRST_NOTICE_S", 0.5)
    monkeypatch.setattr(timing, "LONGEST_PAUSE_S", 0.5)
    told: list[str] = []
    with session_with(tmp_path, ",".join([nowhere] * count), vllm_wait=4) as running:
        with pytest.raises(session.RunError, match=why):
            running.wait_ready(told.append)
        assert running.gateways.restarts == [0] * count
    assert any(f"no vLLM server is ready at {nowhere}" in message for message in told), told


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"/health": (404, {})}, "seems to be no vLLM server: /health answers 404"),
        ({"/v1/models": (404, {})}, "seems to be no vLLM server: /v1/models answers 404"),
        ({"/v1/models": (200, {"models": []})}, "answers otherwise.*data"),
        ({"/v1/models": (200, {"data": []})}, "answers otherwise.*IndexError"),
        ({"/v1/models": (200, ["llama"])}, "answers otherwise"),
        ({"/v1/completions": (200, {"choices": []})}, "answers otherwise"),
        ({"/v1/completions": (200, {"choices": [CHOICE | {"logprobs": None}]})}, "otherwise"),
        ({"/v1/models": (403, {})}, "sampler.vllm.key_env"),
    ],
)
def test_a_server_of_another_kind_is_refused_at_once(
    server: Server, answers: dict[str, tuple[int, Any]], why: str
) -> None:
    server.answers = answers
    sampler = VllmSampler(server.url, eos_ids=frozenset({2}), context_length=128)
    with pytest.raises(VllmError, match=why):
        sampler.start()
