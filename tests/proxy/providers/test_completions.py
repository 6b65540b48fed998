"""Text completions of providers' models: a second gateway is the provider, official SDKs ask."""

from __future__ import annotations

from typing import Any

import pytest
from official_clients import client
from provider_servers import SECRET, asking, post_to, recorded, said, streaming
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel


@pytest.mark.parametrize("kind", ["openai", "text-completion-openai"])
@pytest.mark.parametrize("stream", [False, True])
def test_completions(start: Any, provider: Running, kind: str, stream: bool) -> None:
    """Several prompts, several choices, echo: a chat model is asked in chat, another in text."""
    other = ProviderModel(f"{kind}/policy", f"{provider.url}/v1", SECRET, num_retries=0, timeout=60)
    gateway: Running = start(provider_models={"answerer": other})
    prompts = ["Once upon", "Two upon"]
    with client(gateway) as api:
        made: Any = api.completions.create(
            model="answerer", prompt=prompts, n=2, echo=True, max_tokens=5, seed=3, stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        usage = made_id = None
        for one in made if stream else [made]:
            usage, made_id = one.usage or usage, one.id
            for choice in one.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    asked = sorted(
        provider.sampler.requests, key=lambda r: "Two" in gateway.renderer.decode(r.prompt_ids)
    )
    for i, prompt in enumerate(prompts):
        prompted = gateway.renderer.decode_raw(asked[i].prompt_ids)
        assert (prompted == prompt) is (kind != "openai")
        assert prompt in prompted
        for choice in range(2):
            answer = gateway.renderer.decode(asked[i].sampled[choice])
            assert texts[2 * i + choice] == prompt + answer
    assert set(reasons.values()) == {"length"}
    calls = sorted(recorded(gateway, 4), key=lambda call: call.choice)
    assert [call.id for call in calls] == [made_id, *(f"{made_id}#{i}" for i in (1, 2, 3))]
    assert made_id is not None
    assert made_id.startswith("cmpl-")
    for i, call in enumerate(calls):
        assert call.response is not None
        [choice] = call.response["choices"]
        assert prompts[i // 2] + choice["message"]["content"] == texts[i]
    assert usage is not None
    assert usage.total_tokens == sum(calls[i].params["usage"]["total_tokens"] for i in (0, 2))
    spent = gateway.store.spent(gateway.claims[0].attempt_id)
    assert spent == (4, usage.total_tokens)


@pytest.mark.parametrize("kind", ["openai", "text-completion-openai"])
def test_logprobs_of_a_completion(start: Any, provider: Running, kind: str) -> None:
    other = ProviderModel(f"{kind}/policy", f"{provider.url}/v1", SECRET, num_retries=0, timeout=60)
    gateway: Running = start(provider_models={"answerer": other})
    provider.sampler.script = lambda *_: "Hi there, I'm Qwen"
    with client(gateway) as api:
        answer = api.completions.create(model="answerer", prompt="Hi", logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([-0.25 - i / 64 for i in range(3)])
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == 3


@pytest.mark.parametrize("entry", [{"bytes": None, "top_logprobs": []}, {}])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_that_lack_something(start: Any, faulty: Any, stream: bool, entry: Any) -> None:
    """OpenAI's bytes may be null; LiteLLM's Gemini tells neither them nor alternatives."""
    entries = [{"token": token, "logprob": -0.5, **entry} for token in ("grü", "ße")]
    logprobs = {"content": entries, "refusal": None}
    whole = said("grüße")
    whole["choices"][0]["logprobs"] = logprobs
    pieces = streaming(
        *({"delta": {"content": one["token"]}, "logprobs": {"content": [one]}} for one in entries)
    )
    upstream = faulty((200, pieces if stream else whole))
    gateway = asking(start, upstream)
    for retries in ("0", "1"):
        with client(gateway) as api:
            made: Any = api.completions.create(
                model="answerer", prompt="Hi", logprobs=0, stream=stream,
                extra_headers={"x-stainless-retry-count": retries},
            )  # fmt: skip
            told = [one.choices[0].logprobs for one in (made if stream else [made]) if one.choices]
        given = [logprobs for logprobs in told if logprobs is not None]
        assert len(given) == (2 if stream and retries == "0" else 1)
        names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
        columns = [[one for said in given for one in getattr(said, name)] for name in names]
        assert columns == [["grü", "ße"], [0, 3], [-0.5, -0.5], [{}, {}]]
    [call] = recorded(gateway, 1)
    assert call.response is not None
    [first, _] = call.response["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "grü", "logprob": -0.5, "bytes": [*"grü".encode()], "top_logprobs": [],
    }  # fmt: skip


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1], [2]], [], None, [""] * 200])
def test_prompts_that_a_provider_cannot_take(gateway: Running, prompt: Any) -> None:
    response = post_to(gateway, "completions", prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    recorded(gateway, 0)
