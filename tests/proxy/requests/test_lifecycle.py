"""A request from its acceptance to its answer, in each protocol."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODIES, HTTP, ask, post, wait_until
from official_clients import CALL, USER, client
from scripted_sampler import Running
from speakers import SPEAKERS

from agentrl_proxy.requests.recording import derived_seed
from agentrl_tracer.schemas import CallState, SkipReason

PREFIXES = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}
RETRY = {"x-stainless-retry-count": "1"}

in_each_protocol = pytest.mark.parametrize("path", BODIES)
whole_or_streamed = pytest.mark.parametrize("stream", [False, True])


def reading(gateway: Running, path: str, timeout: float = 60.0, **more: Any) -> Any:
    """A context of an answer whose body has not been read."""
    claim = gateway.claims[0]
    headers = {"authorization": f"Bearer {claim.key}"}
    body = {"model": "policy"} | BODIES[path] | more
    url = f"{gateway.base_url(claim)}/{path}"
    return HTTP.stream("POST", url, json=body, headers=headers, timeout=timeout)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@in_each_protocol
def test_answer_is_recorded_token_for_token(gateway: Running, path: str) -> None:
    sent = BODIES[path] | {"model": "gpt-5", "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    answer = ask(gateway, path, **sent).json()
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(gateway.claims[0])
    renderer = gateway.renderer
    prompt = renderer.encode("Say you are 7.") if path == "completions" else renderer.render(USER)
    assert call.prompt_ids == seen.prompt_ids == prompt
    assert call.response_ids == seen.sampled[0]
    assert call.response_ids[-1] == renderer.tokenizer.eos_token_id
    assert call.response_logprobs == [-0.25 - i / 64 for i in range(len(call.response_ids))]
    assert call.id == call.response_id == answer["id"]
    assert answer["id"].startswith(PREFIXES.get(path, "msg_"))
    assert (call.model, call.adapter, call.adapter_version) == ("gpt-5", "policy", 3)
    assert (seen.params.temperature, seen.params.top_p, seen.params.top_k) == (0.5, 0.9, 7)
    assert call.request == sent
    said = renderer.decode(seen.sampled[0])
    assert json.dumps(said)[1:-1] in json.dumps(answer)
    assert call.response is not None
    assert call.response["choices"][0]["message"]["content"] == said
    assert len(call.prompt_ids) in answer["usage"].values()
    assert len(call.response_ids) in answer["usage"].values()
    assert gateway.store.accounting(gateway.run_id).adds_up


SAID = [
    f"<think>\nhm\n</think>\n\nLet me look.{CALL}\n{CALL}",
    "Just grüße 👍 text",
    CALL,
    "<think>\nhm, grüße\n</think>\n\nI am 7.",
    "",
]


@pytest.mark.parametrize("path", SPEAKERS)
@pytest.mark.parametrize("said", SAID)
def test_stream_says_what_the_whole_answer_says(gateway: Running, path: str, said: str) -> None:
    gateway.sampler.script = lambda *_: said
    claim = gateway.claims[0]
    whole, stream = (SPEAKERS[path](gateway, claim, USER, stream) for stream in (False, True))
    for made in (whole, stream):
        assert made.calls == [("search", {"q": "köln", "k": 3})] * said.count("</tool_call>")
        assert made.thought == (said.split("\n")[1] if "<think>" in said else "")
        assert made.text == said.split("</think>\n\n")[-1].split("<tool_call>")[0]
        assert made.reason == ("tool_calls" if made.calls else "stop")
    assert stream.usage == whole.usage
    assert [call.id for call in gateway.calls(claim)] == [whole.id, stream.id]


@whole_or_streamed
def test_one_conversation_is_one_prompt_in_each_protocol(gateway: Running, stream: bool) -> None:
    """Twelve turns of calls and results, each of which continues the tokens of the one before."""
    turns = [
        f"<think>\nhm, grüße\n</think>\n\nLet me look.\n{CALL}\n{CALL}", CALL, "It is 7.",
        f"Again:\n\n{CALL}", '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"q": [1, 2.50, null, {"a": "<b>"}]}}'
        "\n</tool_call>",
    ] * 2  # fmt: skip
    for claim, speak in zip(gateway.claims, SPEAKERS.values(), strict=True):
        said = iter(turns)
        gateway.sampler.script = lambda *_, said=said: next(said)
        conversation: list[Any] = [{"role": "user", "content": "Find 7."}]
        for _ in turns:
            conversation += speak(gateway, claim, conversation, stream).turn
        calls = gateway.calls(claim)
        assert [call.params["continued"] for call in calls] == [False] + [True] * 11
        for before, after in pairwise(calls):
            known = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(known)] == known
    prompts = [[call.prompt_ids for call in gateway.calls(claim)] for claim in gateway.claims]
    assert prompts[0] == prompts[1] == prompts[2]


@in_each_protocol
def test_text_leaves_as_it_is_sampled(gateway: Running, path: str) -> None:
    gateway.sampler.delay = 0.02
    times: list[float] = []
    with reading(gateway, path, stream=True) as answer:
        times += [time.monotonic() for line in answer.iter_lines() if "data:" in line]
    assert len(times) > 10
    assert times[-1] - times[0] > 0.2


@in_each_protocol
@whole_or_streamed
def test_disconnect_cancels_and_keeps_the_partial_answer(
    gateway: Running, path: str, stream: bool
) -> None:
    gateway.sampler.delay = 0.05
    claim = gateway.claims[0]
    more: Any = {"stream": stream} | ({"prompt": ["One", "Two"]} if path == "completions" else {})
    if stream:
        with reading(gateway, path, **more) as response:
            next(response.iter_lines())
            wait_until(lambda: all(seen.sampled for seen in gateway.sampler.requests))
    else:
        post(f"{gateway.base_url(claim)}/messages", claim.key, {})  # imports LiteLLM
        with pytest.raises(httpx.ReadTimeout), reading(gateway, path, timeout=0.4, **more):
            pass
    wait_until(lambda: gateway.stats["cancelled"] == 1 and not gateway.stats["in_flight"])
    calls = gateway.calls(claim)
    for seen, call in zip(gateway.sampler.requests, calls, strict=True):
        assert seen.cancelled
        assert call.state is CallState.CANCELLED
        assert call.skip_reason is SkipReason.CLIENT_DISCONNECTED
        assert call.response_ids == seen.sampled[0]
        assert len(call.response_ids) == len(call.response_logprobs) > 0
    assert gateway.store.accounting(gateway.run_id).adds_up


@whole_or_streamed
def test_sealed_while_sampling(gateway: Running, stream: bool) -> None:
    claim = gateway.claims[0]

    def script(*_: Any) -> str:
        gateway.seal(claim)
        return "too late"

    gateway.sampler.script = script
    answer = ask(gateway, "chat/completions", stream=stream)
    assert answer.status_code == (200 if stream else 409)
    assert "attempt_sealed" in answer.text
    assert 'finish_reason":"' not in answer.text
    [call] = gateway.calls(claim)
    assert call.skip_reason is SkipReason.LATE_CALL
    assert gateway.store.accounting(gateway.run_id).adds_up
    assert gateway.stats["late"] == 1


@in_each_protocol
@pytest.mark.parametrize(("stream", "after"), [(False, 3), (True, 0), (True, 4)])
def test_sampler_failure(gateway: Running, path: str, stream: bool, after: int) -> None:
    gateway.sampler.fail_after = after
    gateway.sampler.script = lambda *_: "One two three four five six"
    more = {"prompt": ["One", "Two"]} if path == "completions" else {}
    answer = ask(gateway, path, stream=stream, **more)
    if stream and after:
        assert answer.status_code == 200
        last = events_of(answer)[-1]
        assert "the engine fell over" in str(last)
        assert path != "messages" or (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert path != "responses" or last["type"] == "response.failed"
    else:  # before the first byte there is still a status to set
        assert answer.status_code == 503
    for call in gateway.calls(gateway.claims[0]):
        assert call.state is CallState.ERROR
        assert call.skip_reason is SkipReason.SAMPLER_ERROR
        assert call.error
        assert call.params["error_status"] == 503
        assert len(call.response_ids) <= after
    assert len(gateway.calls(gateway.claims[0])[0].response_ids) == after
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


@whole_or_streamed
def test_nothing_final_leaves_before_the_commit(gateway: Running, stream: bool) -> None:
    gate = gateway.deps.writer = Gate(gateway.deps.writer)
    claim = gateway.claims[0]
    got: list[str] = []

    def read() -> None:
        with reading(gateway, "chat/completions", stream=stream) as response:
            got.extend(response.iter_text())

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: gateway.sampler.requests and gateway.stats["in_flight"])
    time.sleep(0.3)
    early = "".join(got)
    assert 'finish_reason":"' not in early
    assert "[DONE]" not in early
    assert stream == bool(early)
    assert gateway.calls(claim)[0].state is CallState.OPEN
    gate.commit.set()
    reader.join()
    assert 'finish_reason":"stop' in "".join(got)
    assert gateway.calls(claim)[0].state is CallState.COMPLETED


@whole_or_streamed
def test_an_answer_that_cannot_be_recorded_is_no_answer(gateway: Running, stream: bool) -> None:
    gate = gateway.deps.writer = Gate(gateway.deps.writer)
    gate.broken = True
    gate.commit.set()
    answer = ask(gateway, "chat/completions", stream=stream)
    assert "store_error" in answer.text
    assert "disk" not in answer.text
    assert 'finish_reason":"' not in answer.text


@in_each_protocol
def test_refusals_are_those_of_the_protocol(gateway: Running, path: str) -> None:
    anthropic = path == "messages"

    def refused(status: int, kind: str, key: str | None = None) -> None:
        answer = ask(gateway, path, key)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert answer.json().get("type") == ("error" if anthropic else None)
        assert error["message"]
        assert not anthropic or error["type"] == kind

    refused(401, "authentication_error", "sk-agentrl-wrong")
    refused(403, "permission_error", gateway.claims[1].key)
    gateway.sampler.healthy = False
    refused(503, "api_error")
    assert HTTP.get(f"{gateway.url}/healthz").status_code == 503
    assert int(ask(gateway, path).headers["retry-after"]) >= 1
    assert gateway.calls(gateway.claims[0]) == []
    gateway.seal(gateway.claims[0])
    refused(409, "invalid_request_error")


@in_each_protocol
def test_retries(gateway: Running, path: str) -> None:
    """A marked retry replays; an unmarked repetition is a sample of its own."""
    marks = ({}, RETRY, RETRY, {}, RETRY)
    made = [ask(gateway, path, headers=headers).json() for headers in marks]
    other = ask(gateway, path, temperature=0.5, headers=RETRY).json()
    streams = [ask(gateway, path, stream=True, headers=headers) for headers in ({}, RETRY, RETRY)]
    assert made[0] == made[1] == made[2] != made[3] == made[4]
    assert other["id"] not in {one["id"] for one in made}
    assert streams[1].text == streams[2].text
    texts = ["".join(_text(event) for event in events_of(one)) for one in streams]
    assert texts[0] == texts[1] != ""
    assert len(gateway.sampler.requests) == len(gateway.calls(gateway.claims[0])) == 4
    assert gateway.stats["replayed"] == 5


def _text(event: dict[str, Any]) -> str:
    delta = event.get("delta") or (event.get("choices") or [{}])[0]
    if isinstance(delta, str):
        return delta
    return delta.get("text") or delta.get("delta", {}).get("content") or ""


async def test_a_retry_joins_the_running_request(gateway: Running) -> None:
    gateway.sampler.delay = 0.02
    claim = gateway.claims[0]
    async with openai.AsyncOpenAI(
        base_url=gateway.base_url(claim), api_key=claim.key, max_retries=0
    ) as api:
        first = asyncio.create_task(api.chat.completions.create(model="policy", messages=USER))
        await asyncio.sleep(0.15)
        second = asyncio.create_task(
            api.chat.completions.create(model="policy", messages=USER, extra_headers=RETRY)
        )
        await asyncio.sleep(0.1)
        first.cancel()  # its client leaves; the retry still wants the answer
        answer = await second
    assert len(gateway.sampler.requests) == 1
    [call] = gateway.calls(claim)
    assert call.response_id == answer.id
    assert call.state is CallState.COMPLETED


async def test_concurrent_requests_are_separate_samples(gateway: Running) -> None:
    """No request has a seed: each derives its own from its attempt and place."""
    claim = gateway.claims[0]
    async with openai.AsyncOpenAI(base_url=gateway.base_url(claim), api_key=claim.key) as api:
        answers = await asyncio.gather(
            *(api.chat.completions.create(model="policy", messages=USER) for _ in range(20))
        )
    calls = gateway.calls(claim)
    assert [call.seq for call in calls] == list(range(20))
    assert [call.params["seed"] for call in calls] == [derived_seed(100, i) for i in range(20)]
    assert len({answer.choices[0].message.content for answer in answers}) > 15
    with client(gateway, gateway.claims[1]) as other:
        other.chat.completions.create(model="policy", messages=USER)
    assert gateway.calls(gateway.claims[1])[0].params["seed"] == derived_seed(101, 0)
