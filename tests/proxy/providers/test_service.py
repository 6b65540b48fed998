"""Providers' models through LiteLLM: a second gateway is the provider, the official client asks."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from gateway_client import wait_until
from official_clients import TOOLS, USER, client, streamed
from provider_servers import (
    SECRET,
    answerer,
    asking,
    assert_no_key,
    only_call,
    post_to,
    said,
    streaming,
    trouble,
)
from running_gateway import running
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.protocols import conversion
from agentrl_proxy.protocols.chat import MAX_MESSAGES, MAX_TOOLS
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import CallState, SkipReason


def test_litellm_is_imported_before_the_gateway_serves(gateway: Running) -> None:
    assert gateway.app.state.gateway.providers._router.done()
    assert conversion.translators.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": USER * (MAX_MESSAGES + 1)}),
        ("responses", {"input": USER * (MAX_MESSAGES + 1)}),
        ("messages", {"messages": USER * (MAX_MESSAGES + 1), "max_tokens": 4}),
        ("chat/completions", {"messages": USER, "tools": TOOLS * (MAX_TOOLS + 1)}),
    ],
)
def test_what_litellm_takes_long_for_is_bounded(gateway: Running, path: str, body: Any) -> None:
    said = post_to(gateway, path, **body)
    assert said.status_code == 400
    assert "list of up to" in said.text


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_recorded(gateway: Running, provider: Running, stream: bool) -> None:
    said = post_to(gateway, messages=USER, max_tokens=9, stream=stream)
    assert said.status_code == 200
    call = only_call(gateway)
    [asked] = provider.sampler.requests
    assert call.tokens == (len(asked.prompt_ids), len(asked.sampled[0]))


def test_answer_is_recorded_and_not_trained(gateway: Running, provider: Running) -> None:
    with client(gateway) as api:
        answer = api.chat.completions.create(
            model="answerer", messages=USER, seed=5, max_tokens=9, user="u", extra_body={"odd": 1}
        )
        ours = api.chat.completions.create(model="policy", messages=USER)
        listed = [model.id for model in api.models.list()]
    assert listed == ["answerer", "base", "policy"]
    [asked] = provider.sampler.requests
    assert (asked.params.seed, asked.params.max_tokens) == (5, 9)
    said = provider.renderer.decode(asked.sampled[0])
    assert answer.choices[0].message.content == said
    assert answer.model == "answerer"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(asked.sampled[0])
    call, trained = gateway.calls(gateway.claims[0])
    assert trained.id == ours.id
    assert (call.seq, trained.seq) == (0, 1)
    assert call.id == call.response_id == answer.id
    assert (call.model, call.adapter, call.adapter_version) == ("answerer", None, None)
    assert (call.state, call.skip_reason) == (CallState.COMPLETED, SkipReason.NOT_TRAINABLE_MODEL)
    assert (call.prompt_ids, call.response_ids, call.response_logprobs) == ([], [], [])
    assert call.finish_reason == answer.choices[0].finish_reason == "length"
    assert call.request is not None
    assert call.request["messages"] == USER
    assert call.response is not None
    assert call.response["choices"][0]["message"]["content"] == said
    assert call.params["usage"]["total_tokens"] == answer.usage.total_tokens
    assert call.params["provider_model"] == "policy"
    assert call.params["provider_id"] != answer.id
    sums = gateway.store.accounting(gateway.run_id)
    assert sums.adds_up
    assert (sums.proxied, sums.pending, sums.skipped) == (
        2, 1, {SkipReason.NOT_TRAINABLE_MODEL: 1},
    )  # fmt: skip
    assert_no_key(gateway)


def test_choices(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.chat.completions.create(model="answerer", messages=USER, n=3, seed=1)
    calls = sorted(gateway.calls(gateway.claims[0]), key=lambda call: call.choice)
    assert [call.id for call in calls] == [answer.id, f"{answer.id}#1", f"{answer.id}#2"]
    said = [call.response["choices"][0]["message"]["content"] for call in calls if call.response]
    assert said == [choice.message.content for choice in answer.choices]
    assert len(set(said)) == 3
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("counted", [False, True])
def test_a_stream_is_incremental_and_recorded_before_it_ends(
    gateway: Running, provider: Running, counted: bool
) -> None:
    provider.sampler.delay = 0.05
    more: Any = {"stream_options": {"include_usage": True}} if counted else {}
    text, finish, usage, times = "", None, None, list[float]()
    with client(gateway) as api:
        for chunk in api.chat.completions.create(
            model="answerer", messages=USER, stream=True, seed=2, **more
        ):
            times.append(time.monotonic())
            assert chunk.model == "answerer"
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            assert (only_call(gateway).state is CallState.COMPLETED) is (finish is not None)
    assert len(times) > 8
    assert times[-1] - times[0] > 0.2
    [asked] = provider.sampler.requests
    assert (text, finish) == (provider.renderer.decode(asked.sampled[0]), "stop")
    assert (usage is not None) == counted
    call = only_call(gateway)
    assert call.response is not None
    assert call.response["choices"][0]["message"]["content"] == text
    assert call.params["usage"]["completion_tokens"] == len(asked.sampled[0])
    assert call.finish_reason == "stop"


SEARCH = {"name": "search", "arguments": ""}
PIECES = [{"arguments": '{"q":'}, {"arguments": ' "a"}'}]
WHOLE = {"name": "search", "arguments": '{"q": "a"}'}


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        # Ids made up for every piece; id and name in every piece; neither index nor id.
        ([{"id": f"{i}", "index": 0, "function": f} for i, f in enumerate([SEARCH, *PIECES])], 1),
        ([{"id": "0", "index": 0, "function": {**SEARCH, **f}} for f in PIECES], 1),
        ([{"function": f} for f in (SEARCH, *PIECES)], 1),
        # Ollama tells each call in a chunk of its own, and LiteLLM gives each index 0.
        ([{"id": f"{i}", "index": 0, "function": WHOLE} for i in range(2)], 2),
        # Two calls at once, and indexes that do not begin at 0.
        ([{"id": f"{i}", "index": i, "function": SEARCH} for i in (1, 2)]
         + [{"index": i, "function": f} for f in PIECES for i in (1, 2)], 2),
    ],
)  # fmt: skip
def test_pieces_of_tool_calls(start: Any, faulty: Any, pieces: list[Any], count: int) -> None:
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"tool_calls": [{"type": "function", **piece}]} for piece in pieces]
    data = streaming(*({"delta": delta} for delta in deltas), finish_reason="tool_calls")
    gateway = asking(start, faulty((200, data)))
    with client(gateway) as api:
        made = api.chat.completions.create(
            model="answerer", messages=USER, tools=TOOLS, stream=True
        )
        _, told, finish, _ = streamed(made)
    call = only_call(gateway)
    assert call.response is not None
    kept = call.response["choices"][0]["message"]["tool_calls"]
    assert finish == call.finish_reason == "tool_calls"
    assert len({one["id"] for one in kept}) == count
    assert [one["id"] for one in kept] == [one.id for one in told]
    assert [one["function"] for one in kept] == [WHOLE] * count
    assert [one.function.arguments for one in told] == [WHOLE["arguments"]] * count


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_fails(start: Any, faulty: Any, begun: bool) -> None:
    """Before its first chunk it is an error response; later the error is its last event."""
    pieces = [{"delta": {"role": "assistant", "content": "half"}}] if begun else []
    data, *_ = streaming(*pieces).rpartition(b'data: {"id"')
    data += b"data: " + json.dumps(trouble(f"broken, {SECRET}")).encode() + b"\n\n"
    gateway = asking(start, faulty((200, data)))
    response = post_to(gateway, stream=True)
    *events, last = [line[6:] for line in response.text.splitlines() if line] if begun else ["", ""]
    assert ("half" in "".join(events)) is begun
    assert response.status_code == (200 if begun else 500)
    error = (json.loads(last) if begun else response.json())["error"]
    assert "broken, [key]" in error["message"]
    call = only_call(gateway)
    assert (call.state, call.error) == (CallState.ERROR, error["message"])
    assert (call.response is not None) is begun
    if call.response is not None:
        assert call.response["choices"][0]["message"]["content"] == "half"
    assert call.params["usage_unknown"] == "the answer did not come to its end"


FORCED = {"force": {"temperature": 0.25}}


def test_the_rollouts_temperature_holds_for_what_stands_in_for_the_policy(
    start: Any, provider: Running
) -> None:
    """And not for other models that the agent asks, a judge for instance."""
    gateway: Running = start(
        FORCED,
        provider_models={
            "policy": answerer(provider, is_policy=True),
            "judge": answerer(provider),
        },
    )
    for name in ("policy", "judge"):
        post_to(gateway, model=name, temperature=0.75)
    post_to(gateway, "responses", "policy")
    asked = [request.params.temperature for request in provider.sampler.requests]
    assert asked == [0.25, 0.75, 0.25]
    recorded = [call.params["temperature"] for call in gateway.calls(gateway.claims[0])]
    assert recorded == [0.25, 0.75, 0.25]


@pytest.mark.parametrize("model", ["openai/o3", "openai/gpt-5", "openai/unheard-of"])
def test_a_model_that_refuses_the_rollouts_temperature_is_asked_without(
    start: Any, faulty: Any, model: str
) -> None:
    """LiteLLM knows it of some models; others say so themselves, and are not asked twice again."""
    answers = [(200, said("fine"))]
    if model == "openai/unheard-of":
        refusal = "Unsupported value: 'temperature' does not support 0.25 with this model."
        answers.insert(0, (400, trouble(refusal, "unsupported_value")))
    upstream = faulty(*answers)
    gateway: Running = start(
        FORCED,
        provider_models={"policy": ProviderModel(model, upstream.url, SECRET, is_policy=True)},
    )
    for _ in range(2):
        assert '"content":"fine"' in post_to(gateway, model="policy").text
    assert len(upstream.seen) == len(answers) + 1
    assert all("temperature" not in one["body"] for one in upstream.seen[-2:])
    for call in gateway.calls(gateway.claims[0]):
        assert call.params["not_enforced"] == ["temperature"]
        assert "temperature" not in call.params


def test_an_agents_own_temperature_is_refused_as_ever(start: Any, faulty: Any) -> None:
    upstream = faulty((200, said("fine")))
    gateway: Running = start(
        FORCED, provider_models={"judge": ProviderModel("openai/o3", upstream.url, SECRET)}
    )
    refused = post_to(gateway, model="judge", temperature=0.5)
    assert refused.status_code == 400
    assert "temperature" in refused.text
    assert not upstream.seen


def test_a_sealed_attempt_gets_no_answer(gateway: Running, provider: Running) -> None:
    provider.sampler.script = lambda *_: gateway.seal(gateway.claims[0]) or "late"
    with client(gateway) as api, pytest.raises(openai.ConflictError):
        api.chat.completions.create(model="answerer", messages=USER)
    # Whichever of the two was said first stands.
    assert only_call(gateway).skip_reason in (SkipReason.NOT_TRAINABLE_MODEL, SkipReason.LATE_CALL)
    assert gateway.stats["late"] == 1


def test_calls_count_in_the_rollouts_budget(start: Any, provider: Running) -> None:
    gateway: Running = start(
        provider_models={"answerer": answerer(provider)}, max_calls_per_rollout=3
    )
    assert post_to(gateway, n=2).is_success
    assert post_to(gateway, model="policy").is_success
    for model in ("answerer", "policy"):
        refused = post_to(gateway, model=model)
        assert refused.status_code == 429
        assert "made 3 of its 3 calls" in refused.text
    assert len(gateway.calls(gateway.claims[0])) == 3
    assert gateway.stats["over_budget"] == 2


async def test_overload_is_refused_and_every_place_comes_back(
    start: Any, provider: Running
) -> None:
    provider.sampler.delay = 0.05
    gateway: Running = start(max_concurrent=1, provider_models={"answerer": answerer(provider)})
    claim, body = gateway.claims[0], {"model": "answerer", "messages": USER}
    async with httpx.AsyncClient(
        base_url=gateway.base_url(claim), headers={"x-api-key": claim.key}, timeout=30
    ) as api:

        async def ask(path: str = "/chat/completions", **more: Any) -> httpx.Response:
            return await api.post(path, json=body | more)

        first = asyncio.create_task(ask())
        await asyncio.to_thread(wait_until, lambda: provider.sampler.requests)
        refused = await asyncio.gather(ask(), ask(stream=True), ask(model="policy"))
        assert [one.status_code for one in refused] == [429] * 3
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert (await first).status_code == 200
        # Of two prompts the second finds no place; the first gives its own back.
        assert (await ask("/completions", prompt=["a", "b"])).status_code == 429
        assert (await ask(temperature=-1)).status_code == 400
        assert (await ask()).status_code == 200
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_outside_a_rollout(gateway: Running) -> None:
    with client(gateway, base_url=gateway.base_url(), api_key=OPERATOR_KEY) as api:
        api.chat.completions.create(model="answerer", messages=USER)
    sums = gateway.store.accounting(gateway.run_id)
    assert sums.adds_up
    assert sums.skipped == {SkipReason.NO_ROLLOUT: 1}


def test_unknown_models_keep_their_rule(start: Any, provider: Running) -> None:
    models = {"answerer": answerer(provider)}
    strict: Running = start(provider_models=models, accept_any_model=False)
    assert post_to(strict, model="judge").status_code == 404
    assert post_to(strict).is_success


@pytest.mark.parametrize("path", ["chat/completions", "embeddings"])
@pytest.mark.parametrize("stream", [False, True])
def test_others_are_answered_while_litellm_computes(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    computing, release = threading.Event(), threading.Event()

    async def compute(*_: Any, **__: Any) -> None:
        computing.set()
        release.wait(10)
        raise ValueError("done")

    for name in ("acompletion", "aembedding"):
        monkeypatch.setattr(f"litellm.router.Router.{name}", compute)
    more: Any = {"input": "x"} if path == "embeddings" else {"stream": stream}
    with ThreadPoolExecutor(1) as client:
        held = client.submit(post_to, gateway, path, **more)
        try:
            assert computing.wait(10)
            assert post_to(gateway, model="policy").is_success
            assert not held.done()
        finally:
            release.set()
        assert "done" in held.result().text


@pytest.mark.parametrize("upstream", ["openai", "anthropic"])
def test_a_gateway_that_stops_closes_its_connections(
    tmp_path: Path, renderer: Renderer, provider: Running, monkeypatch: Any, upstream: str
) -> None:
    made, init = list[aiohttp.ClientSession](), aiohttp.ClientSession.__init__

    def noted(session: aiohttp.ClientSession, *args: Any, **more: Any) -> None:
        init(session, *args, **more)
        made.append(session)

    monkeypatch.setattr(aiohttp.ClientSession, "__init__", noted)
    base = provider.url if upstream == "anthropic" else f"{provider.url}/v1"
    models = {"answerer": ProviderModel(f"{upstream}/policy", base, SECRET)}
    with running(tmp_path, renderer, {}, provider_models=models) as gateway:
        assert post_to(gateway, "messages", stream=True).is_success
        assert not all(session.closed for session in made)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    assert all(session.closed for session in made)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "n": "2"}, "n"),
        ({"messages": USER, "stream": "yes"}, "stream"),
        ({"messages": USER, "stream_options": 1}, "stream_options"),
    ],
)
def test_what_the_gateway_itself_refuses(gateway: Running, body: Any, param: str) -> None:
    response = post_to(gateway, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert gateway.calls(gateway.claims[0]) == []
