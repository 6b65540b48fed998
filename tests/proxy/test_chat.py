"""Chat completions through the real server with the real client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from gateway_client import HTTP
from official_clients import CALL, TOOLS, USER, client, streamed
from scripted_sampler import Running

from agentrl_proxy.requests.recording import derived_seed
from agentrl_tracer.schemas import CallState, SkipReason


def read(made: Any) -> None:
    """Takes an answer, whole or streamed; neither may come to its finish reason."""
    assert isinstance(made, openai.Stream)
    for chunk in made:
        assert chunk.choices[0].finish_reason is None


def test_answer_is_recorded_token_for_token(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.chat.completions.create(model="gpt-4o-mini", messages=USER)
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(gateway.claims[0])
    assert call.id == call.response_id == answer.id
    assert call.state is CallState.COMPLETED
    assert call.prompt_ids == seen.prompt_ids == gateway.renderer.render(USER)
    assert call.response_ids == seen.sampled[0]
    assert call.response_ids[-1] == gateway.renderer.tokenizer.eos_token_id
    assert call.response_logprobs == pytest.approx(
        [-0.25 - i / 64 for i in range(len(seen.sampled[0]))]
    )
    assert (call.model, call.adapter, call.adapter_version) == ("gpt-4o-mini", "policy", 3)
    assert answer.system_fingerprint == "policy@3"
    assert answer.choices[0].message.content == gateway.renderer.decode(seen.sampled[0])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(call.response_ids)
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert call.request is not None
    assert call.request["messages"] == USER
    assert call.response is not None
    assert call.response["id"] == answer.id
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("stop", [None, ["Qwen"], [" I", "\n"], ["there, I", "42."]])
@pytest.mark.parametrize("seed", range(8))
def test_stream_says_what_the_whole_answer_says(gateway: Running, seed: int, stop: Any) -> None:
    more: dict[str, Any] = {} if stop is None else {"stop": stop}
    with client(gateway) as api:
        whole = api.chat.completions.create(model="policy", messages=USER, seed=seed, **more)
        with api.chat.completions.create(
            model="policy", messages=USER, seed=seed, stream=True,
            stream_options={"include_usage": True}, **more,
        ) as stream:  # fmt: skip
            text, _, finish, usage = streamed(stream)
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage
    first, second = gateway.calls(gateway.claims[0])
    assert first.response_ids == second.response_ids == gateway.sampler.requests[0].sampled[0]
    if stop:
        assert not any(s in text for s in stop)


async def test_async_client(gateway: Running) -> None:
    claim = gateway.claims[0]
    async with openai.AsyncOpenAI(base_url=gateway.base_url(claim), api_key=claim.key) as api:
        answers = await asyncio.gather(
            *(api.chat.completions.create(model="policy", messages=USER) for _ in range(20))
        )
        stream = await api.chat.completions.create(model="policy", messages=USER, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text
    calls = gateway.calls(claim)
    assert [call.seq for call in calls] == list(range(21))
    # No request brought a seed: each derives its own, so equal prompts are separate samples.
    assert len({call.params["seed"] for call in calls}) == 21
    assert len({answer.choices[0].message.content for answer in answers}) > 15


def test_seeds_derive_from_the_attempt_and_the_order(gateway: Running) -> None:
    with client(gateway) as api:
        for _ in range(3):
            api.chat.completions.create(model="policy", messages=USER)
    with client(gateway, gateway.claims[1]) as api:
        api.chat.completions.create(model="policy", messages=USER)
    seeds = [call.params["seed"] for call in gateway.calls(gateway.claims[0])]
    assert seeds == [derived_seed(100, i) for i in range(3)]
    assert gateway.calls(gateway.claims[1])[0].params["seed"] == derived_seed(101, 0)


def test_tool_calls(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: f"Let me look.\n{CALL}\n{CALL}"
    with client(gateway) as api:
        whole = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
        with api.chat.completions.create(
            model="policy", messages=USER, tools=TOOLS, stream=True
        ) as stream:
            text, calls, finish, _ = streamed(stream)
    message = whole.choices[0].message
    assert message.content == text == "Let me look."
    assert whole.choices[0].finish_reason == finish == "tool_calls"
    assert message.tool_calls is not None
    for got in (message.tool_calls, calls):
        assert [call.function.name for call in got] == ["search", "search"]
        assert json.loads(got[0].function.arguments) == {"q": "köln", "k": 3}
        assert len({call.id for call in got}) == 2
    assert [call.index for call in calls] == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "search", "arguments": {q: "x"}}\n</tool_call>',
        'So: <tool_call>{"name": "search"',
        "<tool_call>[1]</tool_call> and so on",
        "a < b <tool",
        "<think>hm",
    ],
)
def test_malformed_tool_calls_are_text(gateway: Running, text: str) -> None:
    gateway.sampler.script = lambda *_: text
    with client(gateway) as api:
        whole = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
        with api.chat.completions.create(
            model="policy", messages=USER, tools=TOOLS, stream=True
        ) as stream:
            got, calls, finish, _ = streamed(stream)
    message = whole.choices[0].message
    assert not message.tool_calls
    assert not calls
    assert message.content == got
    assert finish == whole.choices[0].finish_reason == "stop"
    if "<think>" in text:
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    else:
        assert got == text


def test_without_tools_a_call_is_text(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: CALL
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER)
        none = api.chat.completions.create(
            model="policy", messages=USER, tools=TOOLS, tool_choice="none"
        )
    assert answer.choices[0].message.content == none.choices[0].message.content == CALL


def test_reasoning_is_apart(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: "<think>\nWell, well.\n</think>\n\nI am 7.\n"
    with client(gateway) as api:
        message = api.chat.completions.create(model="policy", messages=USER).choices[0].message
        thought = said = ""
        for chunk in api.chat.completions.create(model="policy", messages=USER, stream=True):
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            said += delta.content or ""
    assert message.content == said == "I am 7.\n"
    assert message.reasoning_content == thought == "Well, well."  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_calls_of_their_own(gateway: Running, stream: bool) -> None:
    with client(gateway) as api:
        made = api.chat.completions.create(model="policy", messages=USER, n=3, stream=stream)
        if stream:
            texts = ["", "", ""]
            for chunk in made:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [choice.message.content for choice in made.choices]
    calls = gateway.calls(gateway.claims[0])
    [seen] = gateway.sampler.requests
    assert [call.choice for call in calls] == [0, 1, 2]
    assert [call.id for call in calls] == [
        calls[0].response_id, f"{calls[0].response_id}#1", f"{calls[0].response_id}#2"
    ]  # fmt: skip
    assert [call.response_ids for call in calls] == [seen.sampled[i] for i in range(3)]
    assert texts == [gateway.renderer.decode(call.response_ids) for call in calls]
    assert len(set(texts)) == 3
    assert {call.seq for call in calls} == {0}
    sums = gateway.store.accounting(gateway.run_id)
    assert sums.adds_up
    assert sums.proxied == 3
    assert calls[1].response is not None
    assert calls[1].response["choices"][0]["message"]["content"] == texts[1]


@pytest.mark.parametrize("stop", [None, "Qwen"])
def test_logprobs(gateway: Running, stop: str | None) -> None:
    gateway.sampler.script = lambda *_: "Hi 👍, I'm Qwen."
    more: dict[str, Any] = {} if stop is None else {"stop": stop}
    with client(gateway) as api:
        answer = api.chat.completions.create(
            model="policy", messages=USER, logprobs=True, top_logprobs=2, **more
        )
        entries = []
        for chunk in api.chat.completions.create(
            model="policy", messages=USER, logprobs=True, top_logprobs=2, stream=True, **more
        ):
            if chunk.choices[0].logprobs:
                entries += chunk.choices[0].logprobs.content or []
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content == entries
    [call, _] = gateway.calls(gateway.claims[0])
    visible = len(call.response_ids) - (stop is None)  # the stop token has no entry
    assert [entry.logprob for entry in entries] == pytest.approx(call.response_logprobs[:visible])
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode().startswith("Hi 👍")
    assert [top.logprob for top in entries[0].top_logprobs] == [entries[0].logprob, -9.0]


def test_length(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER, max_tokens=3)
        newer = api.chat.completions.create(model="policy", messages=USER, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == newer.choices[0].finish_reason == "length"
    first, second = gateway.calls(gateway.claims[0])
    assert (len(first.response_ids), len(second.response_ids)) == (3, 4)
    assert first.finish_reason == "length"


def test_sampling_comes_from_force_then_request_then_attempt_then_gateway(start: Any) -> None:
    sampling = {"temperature": 0.5, "max_tokens": 9, "force": {"temperature": 0}}
    gateway: Running = start(sampling, defaults={"max_tokens": 99, "top_p": 0.9})
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, temperature=1.5)
        api.chat.completions.create(model="policy", messages=USER, max_tokens=5, top_p=0.5)
    first, second = [seen.params for seen in gateway.sampler.requests]
    assert (first.temperature, first.max_tokens, first.top_p) == (0.0, 9, 0.9)
    assert (second.temperature, second.max_tokens, second.top_p) == (0.0, 5, 0.5)


def test_max_tokens_is_cut_to_the_room_there_is(start: Any) -> None:
    gateway: Running = start(context_length=40)
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, max_tokens=1000)
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "long " * 100}]
            )
    assert caught.value.code == "context_length_exceeded"
    prompt = gateway.renderer.render(USER)
    assert gateway.sampler.requests[0].params.max_tokens == 40 - len(prompt)
    assert len(gateway.sampler.requests) == 1


def _wait(until: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_and_keeps_the_partial_answer(gateway: Running, stream: bool) -> None:
    gateway.sampler.delay = 0.05
    claim = gateway.claims[0]
    body = {"model": "policy", "messages": USER, "stream": stream}
    headers = {"authorization": f"Bearer {claim.key}"}
    url = gateway.base_url(claim) + "/chat/completions"
    with httpx.Client(timeout=0.4) as http:
        if stream:
            with http.stream("POST", url, json=body, headers=headers) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(url, json=body, headers=headers)
    _wait(lambda: gateway.stats["cancelled"] == 1 and not gateway.stats["in_flight"])
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(claim)
    assert seen.cancelled
    assert call.state is CallState.CANCELLED
    assert call.skip_reason is SkipReason.CLIENT_DISCONNECTED
    assert call.response_ids == seen.sampled[0]
    assert len(call.response_ids) == len(call.response_logprobs) > 0
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("stream", [False, True])
def test_sealed_while_sampling(gateway: Running, stream: bool) -> None:
    gateway.sampler.delay = 0.02
    claim = gateway.claims[0]

    def script(*_: Any) -> str:
        gateway.seal(claim)
        return "too late"

    gateway.sampler.script = script
    with client(gateway) as api, pytest.raises(openai.APIError) as caught:
        read(api.chat.completions.create(model="policy", messages=USER, stream=stream))
    assert caught.value.code == "attempt_sealed"
    [call] = gateway.calls(claim)
    assert call.skip_reason is SkipReason.LATE_CALL
    assert gateway.store.accounting(gateway.run_id).adds_up
    assert gateway.stats["late"] == 1


@pytest.mark.parametrize(("stream", "after"), [(False, 3), (True, 0), (True, 3)])
def test_sampler_failure(gateway: Running, stream: bool, after: int) -> None:
    gateway.sampler.fail_after = after
    with client(gateway) as api, pytest.raises(openai.APIError) as caught:
        read(api.chat.completions.create(model="policy", messages=USER, stream=stream))
    assert caught.value.code == "sampler_error"
    if not (stream and after):  # before the first byte there is still a status to set
        assert isinstance(caught.value, openai.InternalServerError)
        assert caught.value.status_code == 503
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.ERROR
    assert call.skip_reason is SkipReason.SAMPLER_ERROR
    assert call.error is not None
    assert "fell over" in call.error
    assert len(call.response_ids) == after
    assert gateway.stats["in_flight"] == 0


class Gate:
    """A writer whose commits wait, or fail."""

    def __init__(self, writer: Any) -> None:
        self.open = writer.open
        self._writer = writer
        self.commit = threading.Event()
        self.broken = False

    async def finish(self, call: Any) -> Any:
        await asyncio.to_thread(self.commit.wait, 10)
        if self.broken:
            raise OSError("the disk is full")
        return await self._writer.finish(call)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_final_leaves_before_the_commit(gateway: Running, stream: bool) -> None:
    gate = Gate(gateway.deps.writer)
    gateway.deps.writer = gate
    claim = gateway.claims[0]
    got: list[str] = []

    def ask() -> None:
        body = {"model": "policy", "messages": USER, "stream": stream}
        headers = {"authorization": f"Bearer {claim.key}"}
        url = gateway.base_url(claim) + "/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers) as response:
            got.extend(response.iter_text())

    asking = threading.Thread(target=ask)
    asking.start()
    _wait(lambda: gateway.sampler.requests and gateway.stats["in_flight"])
    time.sleep(0.3)
    early = "".join(got)
    assert 'finish_reason":"' not in early
    assert "[DONE]" not in early
    assert stream == bool(early)
    assert gateway.calls(claim)[0].state is CallState.OPEN
    gate.commit.set()
    asking.join()
    assert 'finish_reason":"stop' in "".join(got)
    assert gateway.calls(claim)[0].state is CallState.COMPLETED


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_recorded_is_no_answer(gateway: Running, stream: bool) -> None:
    gate = Gate(gateway.deps.writer)
    gate.broken = True
    gate.commit.set()
    gateway.deps.writer = gate
    with client(gateway) as api, pytest.raises(openai.APIError) as caught:
        read(api.chat.completions.create(model="policy", messages=USER, stream=stream))
    assert caught.value.code == "store_error"
    assert "disk" not in str(caught.value)


def test_unhealthy_sampler_refuses_without_a_row(gateway: Running) -> None:
    gateway.sampler.healthy = False
    with client(gateway) as api, pytest.raises(openai.InternalServerError) as caught:
        api.chat.completions.create(model="policy", messages=USER)
    assert caught.value.status_code == 503
    assert gateway.calls(gateway.claims[0]) == []
    assert HTTP.get(f"{gateway.url}/healthz").status_code == 503


def test_trace_context_and_agent(gateway: Running) -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{span}-01", "x-agentrl-agent": "player"}
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, extra_headers=headers)
    [call] = gateway.calls(gateway.claims[0])
    assert (call.trace_id, call.span_id, call.agent) == (trace, span, "player")


def test_retries(gateway: Running) -> None:
    """A marked retry replays; an unmarked repetition is a sample of its own."""
    retry = {"x-stainless-retry-count": "1"}
    with client(gateway) as api:
        made = [
            api.chat.completions.create(model="policy", messages=USER, extra_headers=headers)
            for headers in ({}, retry, retry, {}, {**retry})
        ]
        other = api.chat.completions.create(
            model="policy", messages=USER, temperature=0.5, extra_headers=retry
        )
        streams = [
            streamed(
                api.chat.completions.create(
                    model="policy", messages=USER, stream=True, extra_headers=headers
                )
            )[0]
            for headers in ({}, retry)
        ]
    assert made[0] == made[1] == made[2] != made[3] == made[4]
    assert other.id not in {one.id for one in made}
    assert streams[0] == streams[1]
    assert len(gateway.sampler.requests) == len(gateway.calls(gateway.claims[0])) == 4
    assert gateway.stats["replayed"] == 4


async def test_a_retry_joins_the_running_request(gateway: Running) -> None:
    gateway.sampler.delay = 0.02
    claim = gateway.claims[0]
    async with openai.AsyncOpenAI(
        base_url=gateway.base_url(claim), api_key=claim.key, max_retries=0
    ) as api:
        first = asyncio.create_task(api.chat.completions.create(model="policy", messages=USER))
        await asyncio.sleep(0.15)
        second = asyncio.create_task(
            api.chat.completions.create(
                model="policy", messages=USER, extra_headers={"x-stainless-retry-count": "1"}
            )
        )
        await asyncio.sleep(0.1)
        first.cancel()  # its client leaves; the retry still wants the answer
        answer = await second
    assert len(gateway.sampler.requests) == 1
    [call] = gateway.calls(claim)
    assert call.response_id == answer.id
    assert call.state is CallState.COMPLETED


def test_what_auto_does_not_enforce_is_recorded(gateway: Running) -> None:
    function = {**TOOLS[0]["function"], "strict": True}
    strict: list[Any] = [{"type": "function", "function": function}]
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
        api.chat.completions.create(
            model="policy", messages=USER, tools=strict, parallel_tool_calls=False
        )
    plain, asked = gateway.calls(gateway.claims[0])
    assert "not_enforced" not in plain.params
    assert asked.params["not_enforced"] == ["strict"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(start: Any, stream: bool) -> None:
    gateway: Running = start()
    wanted = {"return_token_ids": True}
    with client(gateway) as api:
        made = api.chat.completions.create(
            model="policy", messages=USER, n=2, stream=stream, extra_body=wanted
        )
        if stream:
            ends = [c for c in made if c.choices and c.choices[0].finish_reason]
            prompts = [end.prompt_token_ids for end in ends]
            answers = [end.choices[0].token_ids for end in ends]
        else:
            prompts = [made.prompt_token_ids]
            answers = [choice.token_ids for choice in made.choices]
    [seen] = gateway.sampler.requests
    assert all(prompt == seen.prompt_ids for prompt in prompts)
    assert answers == [seen.sampled[0], seen.sampled[1]]
