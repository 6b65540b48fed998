"""What every real sampler promises the gateway, and a gateway over each, with the tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from official_clients import client
from running_gateway import WEIGHTS, running
from tiny_policy import Policy
from transformers import AutoTokenizer

from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    PromptScorer,
    RefusedError,
    TokenEvent,
)

Answer = tuple[list[TokenEvent], FinishEvent]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """Of the model that ships."""
    return Renderer(AutoTokenizer.from_pretrained(WEIGHTS))


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    return Policy()


@pytest.fixture(scope="module")
def prompt(renderer: Renderer) -> list[int]:
    """Long enough to fill blocks of any prefix cache."""
    talk: list[Any] = [{"role": "system", "content": "You count. " * 90}]
    return renderer.render([*talk, {"role": "user", "content": "Who are you?"}])


@pytest.fixture(scope="module")
def endless(renderer: Renderer) -> tuple[tuple[int, float], ...]:
    """A bias under which no answer ends by itself."""
    return tuple((token, -100.0) for token in range(renderer.vocab_size) if renderer.is_stop(token))


async def ask(
    sampler: Any, prompt: Sequence[int], adapter: str | None = None, **params: Any
) -> list[Answer]:
    params = {"max_tokens": 24, "seed": 1} | params
    events: list[list[TokenEvent]] = [[] for _ in range(params.get("n", 1))]
    finished: dict[int, FinishEvent] = {}
    async for event in sampler.sample(prompt, DecodingParams(**params), adapter):
        if isinstance(event, FinishEvent):
            finished[event.choice] = event
        else:
            assert event.choice not in finished
            events[event.choice].append(event)
    return [(tokens, finished[i]) for i, tokens in enumerate(events)]


def ids(answer: Answer) -> list[int]:
    return [event.token_id for event in answer[0]]


def close(answer: Answer, expected: Sequence[float]) -> bool:
    got = [event.logprob for event in answer[0]]
    return len(got) == len(expected) and max(map(abs, map(float.__sub__, got, expected))) < 2e-4


async def test_log_probs_are_the_policys(
    tiny_sampler: Any, policy: Policy, prompt: list[int], tmp_path: Path
) -> None:
    """Of temperature 1 and the whole vocabulary, however it was sampled."""
    policy.become(1, tmp_path / "v1")
    await tiny_sampler.load_adapter("policy", 1, str(tmp_path / "v1"))
    bias = tuple((token, 3.0) for token in policy.likeliest(prompt))
    for params in (
        {},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "logit_bias": bias, "top_logprobs": 4},
    ):
        [answer] = await ask(tiny_sampler, prompt, "policy", **params)
        assert close(answer, policy.logprobs(prompt, ids(answer)))
        for event in answer[0]:
            assert event.adapter_version == 1
            if params.get("top_logprobs"):
                assert event.top is not None
                values = [value for _, value in event.top]
                assert values == sorted(values, reverse=True)
                assert len(values) == 4
                assert dict(event.top).get(event.token_id, event.logprob) == event.logprob
    [greedy] = await ask(tiny_sampler, prompt, "policy", temperature=0.0)
    assert ids(greedy)[0] == policy.likeliest(prompt)[0]


async def test_given_tokens_are_scored(
    tiny_sampler: Any, policy: Policy, prompt: list[int], tmp_path: Path
) -> None:
    """Each but the first, as the policy sees it, with the likeliest in its place."""
    assert isinstance(tiny_sampler, PromptScorer)
    policy.become(5, tmp_path / "v5")
    await tiny_sampler.load_adapter("policy", 5, str(tmp_path / "v5"))
    best = policy.likeliest(prompt)
    for ids in (prompt, [*prompt, best[0]], [*prompt, best[1]], prompt[:2]):
        for top in (0, 3):
            scores = await tiny_sampler.score(ids, "policy", top)
            expected = policy.logprobs(ids[:1], ids[1:])
            assert close((scores, FinishEvent(0, "stop")), expected)
            for event in scores:
                assert event.adapter_version == 5
                assert len(event.top or ()) == top
                assert dict(event.top or ()).get(event.token_id, event.logprob) == event.logprob
    scores = await tiny_sampler.score([*prompt, best[1]], "policy", 2)
    assert [token for token, _ in scores[-1].top] == best[:2]
    assert await tiny_sampler.score(prompt[:1], "policy", 1) == []
    with policy.model.disable_adapter():
        base = await tiny_sampler.score(prompt, None, 0)
        assert close((base, FinishEvent(0, "stop")), policy.logprobs(prompt[:1], prompt[1:]))
    with pytest.raises(RefusedError):
        await tiny_sampler.score(prompt, "nobody", 0)
    with pytest.raises(ContextLengthError):
        await tiny_sampler.score([5] * (tiny_sampler.context_length + 1), "policy", 0)


async def test_a_publication_is_never_stale(
    tiny_sampler: Any, policy: Policy, prompt: list[int], endless: Any, tmp_path: Path
) -> None:
    """Neither by weights nor by cached keys and values, even from the very same path.

    Right after a publication answers are of the new version, the other adapter's of its own, while
    longer answers of both are being sampled over the same prompt's cached blocks.
    """
    policies = {"asker": policy, "answerer": Policy()}

    async def publish(name: str, version: int, seed: int) -> None:
        path = tmp_path / (f"{name}-first" if not version else name)
        policies[name].become(seed, path)
        await tiny_sampler.load_adapter(name, version, str(path))

    for i, name in enumerate(policies):
        await publish(name, 0, 20 + i)
    for version in (1, 2, 3):
        for i, name in enumerate(policies):
            long = {"max_tokens": 150, "logit_bias": endless}
            running = [asyncio.create_task(ask(tiny_sampler, prompt, n, **long)) for n in policies]
            await asyncio.sleep(0.05)
            await publish(name, version, 30 + 2 * version + i)
            for _ in range(2):  # the second time from the cache
                answers = await asyncio.gather(*(ask(tiny_sampler, prompt, n) for n in policies))
                for (asked, one), [answer] in zip(policies.items(), answers, strict=True):
                    assert close(answer, one.logprobs(prompt, ids(answer)))
                    current = tiny_sampler.adapters[asked]
                    assert {event.adapter_version for event in answer[0]} == {current}
            for [answer] in await asyncio.gather(*running):
                assert answer[1].reason == "length"
        assert tiny_sampler.adapters == tiny_sampler.adapters | dict.fromkeys(policies, version)
    [base] = await ask(tiny_sampler, prompt)
    with policy.model.disable_adapter():
        assert close(base, policy.logprobs(prompt, ids(base)))
    assert base[0][0].adapter_version is None


async def test_an_answer_keeps_the_version_it_began_with(
    tiny_sampler: Any, policy: Policy, prompt: list[int], endless: Any, tmp_path: Path
) -> None:
    policy.become(1, tmp_path / "v1")
    await tiny_sampler.load_adapter("policy", 1, str(tmp_path / "v1"))
    params = DecodingParams(max_tokens=200, seed=4, logit_bias=endless)
    events = tiny_sampler.sample(prompt, params, "policy")
    begun = [await anext(events)]
    other = Policy()
    other.become(2, tmp_path / "v2")
    await tiny_sampler.load_adapter("policy", 2, str(tmp_path / "v2"))
    [later] = await ask(tiny_sampler, prompt, "policy")
    begun += [event async for event in events]
    tokens = [event for event in begun if isinstance(event, TokenEvent)]
    assert len(tokens) == 200
    versions = [event.adapter_version for event in tokens]
    assert versions == sorted(versions)
    old = [event for event in tokens if event.adapter_version == 1]
    answer = (old, begun[-1])
    assert close(answer, policy.logprobs(prompt, ids(answer)))
    assert {event.adapter_version for event in later[0]} == {2}
    assert close(later, other.logprobs(prompt, ids(later)))


async def test_seeds_and_choices(tiny_sampler: Any, prompt: list[int]) -> None:
    first = await ask(tiny_sampler, prompt, n=3, seed=7, temperature=1.5)
    again = await ask(tiny_sampler, prompt, n=3, seed=7, temperature=1.5)
    other = await ask(tiny_sampler, prompt, n=3, seed=8, temperature=1.5)
    assert list(map(ids, first)) == list(map(ids, again))
    assert len({tuple(ids(answer)) for answer in first + other}) == 6
    greedy = await ask(tiny_sampler, prompt, n=2, temperature=0.0)
    assert ids(greedy[0]) == ids(greedy[1])
    assert {finish.choice for _, finish in first} == {0, 1, 2}


async def test_how_answers_end(
    tiny_sampler: Any, renderer: Renderer, prompt: list[int], endless: Any
) -> None:
    [answer] = await ask(tiny_sampler, prompt, temperature=0.0, max_tokens=64)
    assert answer[1].reason == "stop"
    assert answer[1].stop_string is None
    assert renderer.is_stop(ids(answer)[-1])
    stop = renderer.decode(ids(answer))[3:5]
    [cut] = await ask(tiny_sampler, prompt, temperature=0.0, stop=("nowhere", stop))
    assert cut[1] == FinishEvent(0, "stop", stop_string=stop)
    assert ids(cut) == ids(answer)[: len(ids(cut))]
    assert stop in renderer.decode(ids(cut))
    assert stop not in renderer.decode(ids(cut)[:-1])
    [short] = await ask(tiny_sampler, prompt, max_tokens=3, logit_bias=endless)
    assert (len(short[0]), short[1].reason) == (3, "length")


async def test_the_context_has_an_end(tiny_sampler: Any, prompt: list[int], endless: Any) -> None:
    length = tiny_sampler.context_length
    full = (prompt * 20)[:length]
    with pytest.raises(ContextLengthError, match=str(length)):
        await ask(tiny_sampler, full)
    [answer] = await ask(tiny_sampler, full[:-5], max_tokens=50, logit_bias=endless)
    assert (len(answer[0]), answer[1].reason) == (5, "length")
    with pytest.raises(RefusedError) as refused:
        await ask(tiny_sampler, prompt, "nobody")
    assert refused.value.code == "unknown_adapter"


@pytest.mark.parametrize("grammar", [None, "start: /a{2000}/"])
async def test_closing_cancels(
    tiny_sampler: Any, prompt: list[int], endless: Any, grammar: str | None
) -> None:
    """A constrained answer of vLLM arrives whole, so it is canceled before its first event."""

    async def wait_for(what: Callable[[], bool]) -> None:
        for _ in range(200):
            if what():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(tiny_sampler.stats())

    async def generated() -> int:
        await asyncio.sleep(2.5)  # statistics may be a second old
        await wait_for(lambda: tiny_sampler.stats()["running"] == 0)
        return tiny_sampler.stats()["generated_tokens"]

    before = await generated()
    params = {"max_tokens": 1200, "n": 2, "logit_bias": endless, "grammar": grammar}
    asked = asyncio.create_task(ask(tiny_sampler, prompt, **params))
    await wait_for(lambda: tiny_sampler.stats()["generated_tokens"] > before)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asked, 10.0)
    assert 0 < await generated() - before < 1200


async def test_a_grammar_decides_and_log_probs_stay_the_policys(
    tiny_sampler: Any, renderer: Renderer, policy: Policy, prompt: list[int], tmp_path: Path
) -> None:
    policy.become(1, tmp_path / "v1")
    await tiny_sampler.load_adapter("policy", 1, str(tmp_path / "v1"))
    grammar = 'start: "yes" | "no"'
    answers = await ask(
        tiny_sampler, prompt, "policy", n=3, grammar=grammar, top_logprobs=2, temperature=1.4
    )
    for answer in answers:
        assert renderer.decode(ids(answer)) in ("yes", "no")
        assert close(answer, policy.logprobs(prompt, ids(answer)))
        assert answer[1].log_mass is not None
        # What the mask left is no less likely than what was drawn from it.
        assert sum(event.logprob for event in answer[0]) <= answer[1].log_mass < -1.0
        assert all(len(event.top or ()) == 2 for event in answer[0])
    with pytest.raises(GrammarError):
        await ask(tiny_sampler, prompt, grammar="start: nowhere")


def test_chat_over_a_sampler(tmp_path: Path, tiny_sampler: Any, renderer: Renderer) -> None:
    with running(
        tmp_path, renderer, {}, sampler=tiny_sampler, models={}, default_adapter=None,
        context_length=tiny_sampler.context_length, defaults={"max_tokens": 24},
    ) as gateway:  # fmt: skip
        with client(gateway) as api:
            create = api.chat.completions.create
            asked: list[Any] = [{"role": "user", "content": "Who are you?"}]
            said = create(model="m", messages=asked, seed=7).choices[0].message.content
            chunks = create(model="m", messages=asked, seed=7, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
            assert said
            answered: Any = {"role": "assistant", "content": said}
            create(model="m", messages=[*asked, answered, {"role": "user", "content": "And?"}])
            stop = said[len(said) // 2]
            cut = create(model="m", messages=asked, seed=7, stop=stop)
            assert cut.choices[0].message.content == said[: said.index(stop)]
        calls = gateway.calls(gateway.claims[0])
        assert gateway.store.accounting(gateway.run_id).adds_up
    assert calls[0].response_ids == calls[1].response_ids  # one seed, streamed or not
    for call in calls:
        assert call.response_ids
        assert len(call.response_ids) == len(call.response_logprobs)
        assert all(math.isfinite(p) and p <= 0 for p in call.response_logprobs)
    known = calls[0].prompt_ids + calls[0].response_ids
    assert calls[2].prompt_ids[: len(known)] == known
    assert [call.state for call in calls] == ["completed"] * 4
