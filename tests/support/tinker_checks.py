"""Checks of the official SDK, and of the client's tinker backend, against the server at a URL.

They run in a process of their own (``peer``): the SDK keeps its connections until its process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from client_data import ROW, TINY, supervised
from peer import answer_questions

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
from agentrl_trainer.client import AdamParams, SamplingParams, ServiceClient, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.prepare_batch import UpdateSettings
from agentrl_trainer.models.loading import load_facts

os.environ |= {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
torch.set_num_threads(1)

ADAM = AdamParams(learning_rate=1e-2)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
FACTS = load_facts(TINY)
PROMPT: list[int] = FACTS.tokenizer.encode("I am 7. You are")


def the_sdk_learns_what_the_local_client_does(url: str, folder: Path) -> None:
    types = tinker.types
    service = tinker.ServiceClient(base_url=url)
    client = service.create_lora_training_client(TINY, rank=4, seed=3).result()
    prompt = types.ModelInput.from_ints(ROW)
    inputs: dict[str, Any] = {"target_tokens": ROW[1:], "weights": [1.0] * (len(ROW) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ROW[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(3):
        done = client.forward_backward([datum, datum], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(done.result().metrics["loss:sum"])
    sampler = client.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    sampled = sampler.sample(prompt, 2, greedy).result().sequences
    scores = sampler.compute_logprobs(prompt).result()
    state = client.save_state("s").result().path
    again = service.create_training_client_from_state_with_optimizer(state).result()
    forward = again.forward([datum], "cross_entropy").result()
    custom = again.forward_backward_custom([datum], lambda _, lp: (-lp[0].sum(), {"mine": 2.0}))

    with ServiceClient(folder=folder) as local:
        here = local.create_lora_training_client(TINY, rank=4, seed=3)
        for loss in losses:
            assert here.forward_backward([supervised()] * 2).result().metrics["loss:sum"] == loss
            here.optim_step(ADAM).result()
        expected = here.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
        tokenizer = here.get_tokenizer()
    assert forward.loss_fn_outputs[0]["logprobs"].data == pytest.approx(expected, abs=1e-6)
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    metrics = custom.result().metrics
    assert metrics["mine"] == 2.0
    assert metrics["loss:sum"] == pytest.approx(-expected.sum(), rel=1e-5)
    assert list(sampled[0].tokens) == list(sampled[1].tokens)
    assert client.get_tokenizer().encode("I am 7.") == tokenizer.encode("I am 7.")


def both_backends_give_the_same(url: str, folder: Path) -> None:
    def found(**place: Any) -> dict[str, Any]:
        with ServiceClient(folder=folder / str(len(place)), **place) as service:
            client = service.create_lora_training_client(TINY, rank=4, seed=3)
            added = client.forward_backward([supervised()])
            client.optim_step(optim_params=ADAM).result()
            sampler = client.save_weights_and_get_sampling_client(name="unused")
            weights = client.save_weights_for_sampler("w", ttl_seconds=3600).result().path
            replies = sampler.sample_batch([ROW, ROW[:4]], 2, GREEDY).result()
            scores = sampler.compute_logprobs_batch([ROW, ROW[:3]]).result()
            custom = client.forward_backward_custom(
                [supervised()], lambda _, lp: (-lp[0].sum(), {}), loss_type_input="logprobs"
            )
            state = client.save_state("s", ttl_seconds=3600, user_metadata={"a": "b"})
            again = service.create_training_client_from_state_with_optimizer(state.result().path)
            saved = client.create_sampling_client(weights).sample(ROW, 1, GREEDY).result()
            return {
                "loss": added.result().metrics["loss:sum"],
                "tokens": [s.tokens for r in replies for s in r.sequences],
                "scores": [[x for x in s[1:] if x] for s in scores],
                "custom": round(custom.result().metrics["loss:sum"], 3),
                "forward": logprobs(again, [supervised()])[0],
                "model": client.get_info().model_name,
                "saved": saved.sequences[0].tokens,
                "models": service.supported_models(),
            }

    one, two = found(), found(base_url=url, api_key="tml-test")
    for ours, theirs in zip(one.pop("scores"), two.pop("scores"), strict=True):
        assert all(abs(a - b) < 1e-4 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert one == two


TOKENS = ROW[:6]


def row(sampled: float = -6.0, **extra: list[float]) -> TrainingRow:
    mask = [False, False, True, True, True, True]
    return TrainingRow(TOKENS, mask, [sampled] * 6, [-1.0] * 6, adapter="policy", extra=extra)


def logprobs(client: TrainingClient, data: Any = None) -> list[list[float]]:
    done = client.forward(data or [row()], "cross_entropy").result()
    return [output["logprobs"].tolist() for output in done.loss_fn_outputs]


@contextmanager
def training(url: str, folder: Path) -> Iterator[tuple[TrainingClient, TrainingClient]]:
    """The same adapter over the server, and here."""
    with (
        ServiceClient(base_url=url, folder=folder / "there") as there,
        ServiceClient(folder=folder / "here") as here,
    ):
        options = {"rank": 4, "seed": 1, "name": "policy"}
        clients = [s.create_lora_training_client(TINY, **options) for s in (there, here)]
        yield clients[0], clients[1]


def a_loss_that_is_not_finite_is_not_applied(url: str, folder: Path) -> None:
    """Of Tinker's own loss, and of one that is computed here; the next step is as if it had never
    been."""
    with training(url, folder) as (client, _):
        for loss, sampled in (("importance_sampling", -200.0), ("dro", -1e30)):
            before = logprobs(client)
            added = client.forward_backward([row(sampled)], loss, normalize_by=None, logprobs=False)
            stepped = client.optim_step(ADAM)  # called before the loss is known
            after = client.forward([row()], "cross_entropy")
            assert added.result().stats.skipped_non_finite
            assert stepped.result().metrics == {"skipped_non_finite": 1.0}
            assert [after.result().loss_fn_outputs[0]["logprobs"].tolist()] == before
            some = [row(), row(sampled), row()]
            assert client.finite_rows(some, loss).result() == [0, 2]
        client.forward_backward([row()], "importance_sampling", normalize_by=None)
        assert client.optim_step(ADAM).result().metrics["skipped_non_finite"] == 0
        assert logprobs(client) != before


def rows_there_are_rows_here(url: str, folder: Path) -> None:
    """Loss, metrics and log-probs are the local client's, of each kind of loss."""
    nothing = TrainingRow(TOKENS, [False] * 6, [0.0] * 6, [0.0] * 6, adapter="policy")
    data = [row(), nothing, row(-5.0)]
    with training(url, folder) as (there, here):
        for loss in ("cross_entropy", "ppo", "gspo"):
            expected, found = (client.forward(data, loss).result() for client in (here, there))
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-4), loss
            assert found.stats.tokens == expected.stats.tokens == 8
            for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
                assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def operations_after_prepare_come_after_it(url: str, folder: Path) -> None:
    with training(url, folder) as (client, _):
        [before] = logprobs(client)
        settings = UpdateSettings("ppo", {"correction": "truncate"}, epochs=2)
        client.forward_backward([row()], "importance_sampling", normalize_by=None).result()
        # The worker is kept busy, so that it cannot be quick enough by chance.
        client._service.responses.submit(lambda: time.sleep(0.5))  # type: ignore[attr-defined]
        prepared = client.prepare([row()], settings)
        stepped = client.optim_step(ADAM)
        after = client.forward([row()], "cross_entropy")
        sampler = client.save_weights_and_get_sampling_client()
        (one,) = prepared.result()
        assert one.extra["proximal"] == pytest.approx([0.0, *before])
        assert stepped.result().metrics["skipped_non_finite"] == 0
        found = after.result().loss_fn_outputs[0]["logprobs"].tolist()
        assert found != pytest.approx(before)
        scores = sampler.compute_logprobs(TOKENS).result()
        assert scores[2:] == pytest.approx(found[1:], abs=1e-4)


def the_sampler_gives_what_the_client_does(url: str, folder: Path) -> None:
    with ServiceClient(base_url=url, folder=folder / "client") as service:
        client = service.create_lora_training_client(TINY, rank=4, seed=1)
        path = client.save_weights_for_sampler(folder / "v000003").result().path
        assert json.loads((folder / "v000003" / "tinker.json").read_text())["path"] == path
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        saved = service.create_sampling_client(path)
        sequences = saved.sample(PROMPT, 2, greedy).result().sequences
    sampler = TinkerSampler(TINY, url, FACTS.tokenizer, FACTS.eos_ids, FACTS.context_length)
    sampler.load_now("early", 3, path)
    sampler.start()
    asyncio.run(_check_sampler(sampler, path, sequences))
    sampler.stop()


async def _check_sampler(sampler: TinkerSampler, path: str, sequences: list[Any]) -> None:
    async def events_of(
        prompt: list[int] = PROMPT, adapter: str | None = "policy", **params: Any
    ) -> list[SampleEvent]:
        decoding = DecodingParams(**({"max_tokens": 8, "temperature": 0.0} | params))
        return [event async for event in sampler.sample(prompt, decoding, adapter)]

    with pytest.raises(RefusedError, match="no adapter 'policy' is loaded"):
        await events_of()
    with pytest.raises(RefusedError, match="nothing at"):
        await sampler.load_adapter("policy", 3, path + "x")
    # Requests for weights that have expired say so, until others are published.
    sampler.load_now("policy", 2, path + "x")
    assert sampler.adapters == {"early": 3, "policy": 2}
    with pytest.raises(RefusedError, match="nothing at"):
        await events_of()
    await sampler.load_adapter("policy", 3, path)
    assert sampler.adapters == {"early": 3, "policy": 3}
    assert await events_of(adapter="early") == await events_of()

    events = await events_of(n=2, top_logprobs=2)
    for choice, sequence in enumerate(sequences):
        tokens = [e for e in events if isinstance(e, TokenEvent) and e.choice == choice]
        assert [token.token_id for token in tokens] == sequence.tokens
        assert [t.logprob for t in tokens] == pytest.approx(sequence.logprobs, abs=1e-5)
        assert all(t.adapter_version == 3 and len(t.top or ()) == 2 for t in tokens)
        (end,) = [e for e in events if isinstance(e, FinishEvent) and e.choice == choice]
        assert end.reason == sequence.stop_reason

    stop = FACTS.tokenizer.decode(sequences[0].tokens[:3]).strip()[-1]
    stopped = await events_of(stop=(stop,))
    assert isinstance(stopped[-1], FinishEvent)
    assert stopped[-1].stop_string == stop
    kept = [event.token_id for event in stopped if isinstance(event, TokenEvent)]
    assert kept == sequences[0].tokens[: len(kept)]
    assert len(kept) <= 3

    seeded = [await events_of(temperature=1.0, seed=5, n=2) for _ in range(2)]
    assert seeded[0] == seeded[1]
    base = await events_of(adapter=None)
    assert {e.adapter_version for e in base if isinstance(e, TokenEvent)} == {None}

    with pytest.raises(GrammarError, match="grammar"):
        await events_of(grammar="start: /a/")
    with pytest.raises(ContextLengthError):
        await events_of([5] * FACTS.context_length)
    for name, value in (("logit_bias", ((1, 1.0),)), ("top_p", 7.0)):
        with pytest.raises(RefusedError, match=name) as refused:
            await events_of(**{name: value})
        assert refused.value.code == "invalid_parameter"
    assert sampler.stats()["in_flight"] == 0


def check(name: str, url: str, folder: str) -> str:
    """Return the text of a check's failure, else ""."""
    try:
        globals()[name](url, Path(folder))
    except BaseException:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    answer_questions({"check": check})
