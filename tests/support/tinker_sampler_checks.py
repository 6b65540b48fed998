"""What ``TinkerSampler`` must do, against the server at a URL: run by test_train_tinker."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import SamplingParams as ClientParams
from agentrl.samplers.tinker import TinkerSampler
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    RefusedError,
    SampleEvent,
    TokenEvent,
)
from agentrl_trainer.client import SampledSequence, ServiceClient
from agentrl_trainer.models.loading import load_facts

TINY = "agentrl-tiny"
FACTS = load_facts(TINY)
PROMPT: list[int] = FACTS.tokenizer.encode("I am 7. You are")


def main(url: str, folder: Path) -> None:
    with ServiceClient(base_url=url, folder=folder / "client") as service:
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        path = training.save_weights_for_sampler(folder / "v000003").result().path
        assert json.loads((folder / "v000003" / "tinker.json").read_text())["path"] == path
        saved = service.create_sampling_client(path)
        greedy = ClientParams(max_tokens=8, temperature=0.0)
        sequences = saved.sample(PROMPT, 2, greedy).result().sequences
    sampler = TinkerSampler(
        TINY,
        base_url=url,
        tokenizer=FACTS.tokenizer,
        eos_ids=FACTS.eos_ids,
        context_length=FACTS.context_length,
    )
    assert "no session" in (sampler.load_or_try_later("early", 3, path) or "")
    sampler.start()
    asyncio.run(check(sampler, path, sequences))
    sampler.stop()


async def check(sampler: TinkerSampler, path: str, sequences: list[SampledSequence]) -> None:
    with pytest.raises(RefusedError) as unknown:
        await events_of(sampler)
    assert unknown.value.code == "unknown_adapter"
    with pytest.raises(RefusedError, match="nothing at"):
        await sampler.load_adapter("policy", 3, path + "x")
    # Weights that have expired: whoever asks for them hears of it, until others are published.
    assert "nothing at" in (sampler.load_or_try_later("policy", 2, path + "x") or "")
    assert sampler.adapters == {"early": 3, "policy": 2}
    with pytest.raises(RefusedError, match="nothing at"):
        await events_of(sampler)
    await sampler.load_adapter("policy", 3, path)
    assert sampler.adapters == {"early": 3, "policy": 3}
    assert await events_of(sampler, adapter="early") == await events_of(sampler)

    events = await events_of(sampler, n=2, top_logprobs=2)
    for choice, sequence in enumerate(sequences):
        tokens = [e for e in events if isinstance(e, TokenEvent) and e.choice == choice]
        assert [token.token_id for token in tokens] == sequence.tokens
        assert [t.logprob for t in tokens] == pytest.approx(sequence.logprobs, abs=1e-5)
        assert all(t.adapter_version == 3 and len(t.top or ()) == 2 for t in tokens)
        (end,) = [e for e in events if isinstance(e, FinishEvent) and e.choice == choice]
        assert end.reason == sequence.stop_reason

    stop = FACTS.tokenizer.decode(sequences[0].tokens[:3]).strip()[-1]
    stopped = await events_of(sampler, stop=(stop,))
    assert isinstance(stopped[-1], FinishEvent)
    assert stopped[-1].stop_string == stop
    kept = [event.token_id for event in stopped if isinstance(event, TokenEvent)]
    assert kept == sequences[0].tokens[: len(kept)]
    assert len(kept) <= 3

    seeded = [await events_of(sampler, temperature=1.0, seed=5, n=2) for _ in range(2)]
    assert seeded[0] == seeded[1]
    base = await events_of(sampler, adapter=None)
    assert {e.adapter_version for e in base if isinstance(e, TokenEvent)} == {None}

    with pytest.raises(GrammarError, match="grammar"):
        await events_of(sampler, grammar="start: /a/")
    with pytest.raises(RefusedError, match="logit_bias"):
        await events_of(sampler, logit_bias=((1, 1.0),))
    with pytest.raises(ContextLengthError):
        await events_of(sampler, [5] * FACTS.context_length)
    with pytest.raises(RefusedError, match="top_p") as refused:
        await events_of(sampler, top_p=7.0)
    assert refused.value.code == "invalid_parameter"
    assert sampler.stats()["in_flight"] == 0


async def events_of(
    sampler: TinkerSampler,
    prompt: list[int] = PROMPT,
    adapter: str | None = "policy",
    **params: Any,
) -> list[SampleEvent]:
    asked = DecodingParams(**({"max_tokens": 8, "temperature": 0.0} | params))
    return [event async for event in sampler.sample(prompt, asked, adapter)]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
