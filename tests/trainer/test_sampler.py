"""The sampler engine: every answer is what the model itself would have said."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import Asked, as_base, llama, make_adapter, qwen3, settle, worst_difference

from agentrl_trainer.inference import RequestError, SampleParams, SamplerEngine, SampleRequest
from agentrl_trainer.inference import llama_cpu as lean_decoder
from agentrl_trainer.inference.adapter_swap import MergedWeights, PeftWeights
from agentrl_trainer.inference.sequences import Lane, Sequence
from agentrl_trainer.models.loading import ModelError

CLOSE = 1e-5


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(256) for _ in range(length)]


@pytest.fixture
def base():
    return as_base(qwen3())


@pytest.fixture
def engine_of():
    engines: list[SamplerEngine] = []

    def make(base, **options) -> SamplerEngine:
        engine = SamplerEngine(base, **options)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("merge_below", [10**9, 0], ids=["merged", "unmerged"])
@pytest.mark.parametrize("make", [qwen3, llama], ids=["qwen3", "llama"])
def test_mixed_batch_agrees_with_a_plain_forward(engine_of, tmp_path, make, merge_below) -> None:
    """Mixed lengths, joins midway, shared prefixes, two adapters and the base at once."""
    base = as_base(make())
    references = {None: copy.deepcopy(base.model)}
    for i, name in enumerate(("planner", "player")):
        references[name] = make_adapter(base, tmp_path / name, seed=i + 1)
    engine = engine_of(base, merge_below=merge_below, prefill_chunk=48)
    assert isinstance(engine._weights, MergedWeights if merge_below else PeftWeights)
    for name in ("planner", "player"):
        engine.load_adapter(name, 7, tmp_path / name).result(30)

    shared = prompt(1, 40)
    asked: list[tuple[Asked, str | None]] = []
    for wave in range(4):
        for i, name in enumerate((None, "planner", "player")):
            for length in (1, 5 + wave, 60):
                ids = shared[: 20 + 5 * wave] + prompt(wave * 10 + i, length)
                params = SampleParams(max_tokens=10 + 7 * i + wave, seed=wave)
                asked.append((Asked(engine, ids, params, name), name))
        asked[-1][0].first.wait(30)
    for a, name in asked:
        (answer,) = a.wait()
        assert answer.end is not None
        assert answer.end.reason == "length"
        assert len(answer.tokens) == a.params.max_tokens
        assert {t.adapter_version for t in answer.tokens} == {7 if name else None}
        assert worst_difference(references[name], a.prompt, answer) < CLOSE
    settle(engine)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.reused_tokens > 20 * 12


@pytest.mark.parametrize("merge_below", [10**9, 0], ids=["merged", "unmerged"])
def test_a_version_loaded_after_the_base_was_asked_is_used(
    engine_of, base, tmp_path, merge_below
) -> None:
    plain = copy.deepcopy(base.model)
    engine = engine_of(base, merge_below=merge_below)
    ids, params = prompt(8, 30), SampleParams(max_tokens=8, temperature=0.0)
    for version in (1, 2):
        reference = make_adapter(as_base(plain), tmp_path / f"v{version}", seed=version)
        engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
        (answer,) = Asked(engine, ids, params, "policy").wait()
        assert {t.adapter_version for t in answer.tokens} == {version}
        assert worst_difference(reference, ids, answer) < CLOSE
        assert worst_difference(plain, ids, answer) > 0.01  # it is no small adapter
        (answer,) = Asked(engine, ids, params).wait()
        assert worst_difference(plain, ids, answer) < CLOSE


@pytest.mark.parametrize("merge_below", [10**9, 0], ids=["merged", "unmerged"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "modules"])
def test_an_adapter_of_a_tied_head_is_none_of_the_embeddings(
    engine_of, tmp_path, monkeypatch, lean, merge_below
) -> None:
    base = as_base(qwen3())
    plain = copy.deepcopy(base.model)
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    reference = make_adapter(base, tmp_path / "head", 1, ["lm_head", "q_proj"])
    if not lean:
        monkeypatch.setattr(lean_decoder, "unknown_part", lambda *_: "not in this test")
    engine = engine_of(base, merge_below=merge_below)
    assert (engine.strategy == "llama cpu") == (lean and merge_below > 0)
    engine.load_adapter("head", 1, tmp_path / "head").result(30)
    ids = prompt(9, 30)
    for name, model in (("head", reference), (None, plain)):
        (answer,) = Asked(engine, ids, SampleParams(max_tokens=8), name).wait()
        assert worst_difference(model, ids, answer) < CLOSE
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        scored = engine.score(ids, name).result(30).logprobs
        assert scored[1:] == pytest.approx(expected, abs=CLOSE)


def test_group_shares_one_prefill(engine_of, base) -> None:
    reference = copy.deepcopy(base.model)
    engine = engine_of(base)
    ids = prompt(2, 100)
    asked = Asked(engine, ids, SampleParams(max_tokens=12, n=6, seed=3))
    answers = asked.wait()
    assert engine.stats().prefill_tokens == 100
    assert len({tuple(a.ids) for a in answers}) == 6
    assert all(worst_difference(reference, ids, a) < CLOSE for a in answers)
    # Six separate requests, a moment later: only the last token is computed again.
    before = engine.stats()
    group = [Asked(engine, ids, SampleParams(max_tokens=12)) for _ in range(6)]
    for g in group:
        assert worst_difference(reference, ids, g.wait()[0]) < CLOSE
    after = engine.stats()
    assert after.prefill_tokens - before.prefill_tokens <= 6
    assert after.reused_tokens - before.reused_tokens >= 6 * 99


def test_next_turn_reuses_the_conversation(engine_of, base) -> None:
    reference = copy.deepcopy(base.model)
    engine = engine_of(base)
    ids = prompt(3, 30)
    for _ in range(4):
        asked = Asked(engine, ids, SampleParams(max_tokens=15))
        (answer,) = asked.wait()
        assert worst_difference(reference, ids, answer) < CLOSE
        ids = ids + answer.ids + prompt(4, 5)
    assert answer.end is not None
    # All but the last answer's last token and the five new ones.
    assert answer.end.reused_tokens == len(asked.prompt) - 6


def test_seeded_tokens_do_not_depend_on_the_batch(engine_of, base) -> None:
    engine = engine_of(base)
    params = SampleParams(max_tokens=30, seed=11, n=2, top_p=0.95, temperature=0.8)
    alone = [a.ids for a in Asked(engine, prompt(5, 20), params).wait()]
    crowd = [Asked(engine, prompt(i, 10 + i), SampleParams(max_tokens=40)) for i in range(12)]
    crowd[0].first.wait(30)
    among = [a.ids for a in Asked(engine, prompt(5, 20), params).wait()]
    for c in crowd:
        c.wait()
    assert alone == among
    assert alone[0] != alone[1]
    other = SampleParams(max_tokens=30, seed=12)
    assert Asked(engine, prompt(5, 20), other).wait()[0].ids != alone[0]


def test_greedy_matches_generate(engine_of, base) -> None:
    reference = copy.deepcopy(base.model)
    engine = engine_of(base)
    ids = prompt(6, 25)
    (answer,) = Asked(engine, ids, SampleParams(max_tokens=20, temperature=0)).wait()
    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer.ids == out[0, len(ids) :].tolist()


def test_stop_ids_and_top_logprobs(engine_of, base) -> None:
    engine = engine_of(base)
    params = SampleParams(max_tokens=50, seed=1, temperature=0, top_logprobs=3)
    (free,) = Asked(engine, prompt(7, 9), params).wait()
    stop = free.ids[4]
    (stopped,) = Asked(
        engine, prompt(7, 9), SampleParams(max_tokens=50, temperature=0, stop_ids=frozenset({stop}))
    ).wait()
    cut = free.ids.index(stop) + 1
    assert stopped.ids == free.ids[:cut]
    assert stopped.end is not None
    assert (stopped.end.reason, stopped.end.stop) == ("stop", None)
    for token in free.tokens:
        assert len(token.top) == 3
        assert token.top[0] == pytest.approx((token.token_id, token.logprob))
        assert token.top[0][1] >= token.top[1][1] >= token.top[2][1]


def test_stop_string_across_tokens(engine_of, base) -> None:
    engine = engine_of(base)
    free = SampleParams(max_tokens=60, seed=5)
    ids = Asked(engine, prompt(8, 9), free).wait()[0].ids
    text = base.tokenizer.decode(ids)
    start = next(i for i in range(20, 50) if text[i : i + 3].isascii())
    stop = text[start : start + 3]
    (answer,) = Asked(
        engine, prompt(8, 9), SampleParams(max_tokens=60, seed=5, stop=("zzz never", stop))
    ).wait()
    assert answer.end is not None
    assert (answer.end.reason, answer.end.stop) == ("stop", stop)
    assert answer.ids == ids[: len(answer.ids)]
    found = base.tokenizer.decode(answer.ids)
    assert found.endswith(stop)
    assert found.count(stop) == 1


def test_swap_while_sampling(engine_of, base, tmp_path) -> None:
    references = {v: make_adapter(base, tmp_path / f"v{v}", seed=v) for v in (1, 2, 3)}
    engine = engine_of(base)
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    ids = prompt(9, 30)
    asked = []
    for version in (1, 2, 3):
        if version > 1:
            engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
        asked.append(Asked(engine, ids, SampleParams(max_tokens=200), "policy"))
        asked[-1].first.wait(30)
    for version, a in zip((1, 2, 3), asked, strict=True):
        (answer,) = a.wait()
        assert {t.adapter_version for t in answer.tokens} == {version}
        assert worst_difference(references[version], ids, answer) < CLOSE
        assert answer.end is not None
        assert answer.end.reused_tokens == 0
    settle(engine)
    assert engine.adapters == {"policy": 3}
    assert engine.stats().swaps == 3
    assert [lane.version for lane in engine._scheduler.adapters.lanes] == [None, 3]


@pytest.mark.parametrize("how", ["swap", "unload"])
def test_what_a_superseded_version_had_cached_is_given_back(
    engine_of, base, tmp_path, how: str
) -> None:
    for version in (1, 2):
        make_adapter(base, tmp_path / f"v{version}", seed=version)
    engine = engine_of(base)
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    Asked(engine, prompt(1, 90), SampleParams(max_tokens=20), "policy").wait()
    assert engine.stats().kv_tokens > 90  # kept for whoever asks again
    if how == "swap":
        engine.load_adapter("policy", 2, tmp_path / "v2").result(30)
    else:
        engine.unload_adapter("policy").result(30)
    assert engine.stats().kv_tokens == 0


def test_unload(engine_of, base, tmp_path) -> None:
    make_adapter(base, tmp_path / "a", seed=1)
    engine = engine_of(base)
    engine.load_adapter("policy", 1, tmp_path / "a").result(30)
    running = Asked(engine, prompt(1, 9), SampleParams(max_tokens=100), "policy")
    running.first.wait(30)
    engine.unload_adapter("policy").result(30)
    (answer,) = running.wait()
    assert len(answer.tokens) == 100
    with pytest.raises(RequestError, match="no adapter 'policy'") as caught:
        Asked(engine, prompt(1, 9), SampleParams(max_tokens=1), "policy")
    assert caught.value.code == "unknown_adapter"


def test_bad_adapter_folder_raises_for_the_caller(engine_of, base, tmp_path) -> None:
    engine = engine_of(base)
    with pytest.raises(ModelError, match="missing"):
        engine.load_adapter("policy", 1, tmp_path)
    make_adapter(as_base(llama()), tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="another model"):
        engine.load_adapter("policy", 1, tmp_path / "other")
    assert engine.healthy


def test_a_refused_adapter_leaves_no_trace(engine_of, base, tmp_path) -> None:
    """Beside the weights, where PEFT has put its layers into the model before it reads weights."""
    references = {None: copy.deepcopy(base.model)}
    references["good"] = make_adapter(base, tmp_path / "good", seed=1)
    bad: list[tuple[str, str]] = []
    for name, sizes, said in (
        ("torn", qwen3(), "it lacks 14 tensors"),
        ("deep", qwen3(3), "it has unknown 14 tensors"),
        ("other", llama(), "size mismatch"),
    ):
        make_adapter(as_base(sizes), tmp_path / name, seed=2)
        bad.append((name, said))
    file = tmp_path / "torn" / "adapter_model.safetensors"
    kept = {key: tensor for key, tensor in load_file(file).items() if ".layers.0." in key}
    save_file(kept, file, metadata={"format": "pt"})
    engine = engine_of(base, merge_below=0)
    asked = prompt(1, 9)
    for loaded in (None, "good"):  # refused as the first adapter, and after another one
        if loaded:
            engine.load_adapter(loaded, 1, tmp_path / loaded).result(30)
        for name, said in bad:
            with pytest.raises(ModelError, match=f"(?s)does not fit this model: .*{said}"):
                engine.load_adapter("bad", 1, tmp_path / name).result(30)
            for of in {None, loaded}:
                one = Asked(engine, asked, SampleParams(max_tokens=9, seed=1), of)
                assert worst_difference(references[of], asked, one.wait()[0]) < CLOSE
    peft = engine._weights._peft
    assert len(peft.peft_config) == 1
    assert sum(".lora_A." in name for name, _ in peft.named_parameters()) == 14


def test_the_youngest_is_preempted(engine_of, base, monkeypatch) -> None:
    """Not the one in the last row: rows are ordered by length."""
    youngest: list[tuple[int, int, int]] = []
    leave = Lane.leave

    def spy(lane: Lane, seq: Sequence, *, keep: bool = True) -> None:
        if not keep:
            seeds = [s.request.params.seed for s in lane.decoding]
            youngest.append((seq.request.params.seed, max(seeds), seeds[-1]))
        leave(lane, seq, keep=keep)

    monkeypatch.setattr(Lane, "leave", spy)
    engine = engine_of(base, kv_tokens=2500)
    asked = [
        Asked(engine, prompt(i, 33 - i), SampleParams(max_tokens=100 + i, seed=i))
        for i in range(24)
    ]
    for a in asked:
        assert len(a.wait()[0].tokens) == a.params.max_tokens
    assert all(sent_back == newest for sent_back, newest, _ in youngest)
    assert any(newest != last for _, newest, last in youngest)


def test_tight_budget_preempts_and_still_agrees(engine_of, base) -> None:
    reference = copy.deepcopy(base.model)
    engine = engine_of(base, kv_tokens=600)
    asked = [
        Asked(engine, prompt(i, 20 + i), SampleParams(max_tokens=120, seed=i)) for i in range(12)
    ]
    for a in asked:
        (answer,) = a.wait()
        assert len(answer.tokens) == 120
        assert worst_difference(reference, a.prompt, answer) < CLOSE
    settle(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.kv_tokens <= 600
    roomy = engine_of(as_base(reference))
    again = Asked(roomy, prompt(7, 27), SampleParams(max_tokens=120, seed=7)).wait()[0]
    assert again.ids == asked[7].answers[0].ids


def test_refusals_name_the_reason(engine_of, base) -> None:
    engine = engine_of(base, kv_tokens=300)
    for ids, params, code in (
        ([], SampleParams(max_tokens=1), "invalid_parameter"),
        ([999], SampleParams(max_tokens=1), "invalid_parameter"),
        ([1], SampleParams(max_tokens=0), "invalid_parameter"),
        ([1], SampleParams(max_tokens=1, top_p=0), "invalid_parameter"),
        ([1], SampleParams(max_tokens=1, temperature=float("nan")), "invalid_parameter"),
        ([1] * 512, SampleParams(max_tokens=1), "context_length_exceeded"),
        ([1] * 200, SampleParams(max_tokens=200), "kv_budget_exceeded"),
    ):
        with pytest.raises(RequestError) as caught:
            Asked(engine, ids, params)
        assert caught.value.code == code
    # The context length ends an answer like max_tokens does.
    roomy = engine_of(as_base(qwen3()))
    (answer,) = Asked(roomy, [1] * 500, SampleParams(max_tokens=100)).wait()
    assert len(answer.tokens) == 12
    assert answer.end is not None
    assert answer.end.reason == "length"


def test_long_prompt_does_not_starve_the_others(engine_of, base) -> None:
    engine = engine_of(base, prefill_chunk=16)
    running = Asked(engine, prompt(1, 9), SampleParams(max_tokens=60))
    running.first.wait(30)
    long = Asked(engine, prompt(2, 400), SampleParams(max_tokens=1))
    running.wait()
    long.wait()
    # 25 chunks of 16, and the running sequence got a step between each two of them.
    stats = engine.stats()
    assert stats.prefill_steps >= 26
    assert stats.decode_steps <= 60


def test_cancel(engine_of, base) -> None:
    engine = engine_of(base, max_batch=2)
    running = Asked(engine, prompt(1, 9), SampleParams(max_tokens=400, n=2))
    queued = Asked(engine, prompt(2, 9), SampleParams(max_tokens=5))
    running.first.wait(30)
    running.handle.cancel()
    assert [a.end.reason for a in running.wait() if a.end] == ["cancelled", "cancelled"]
    assert all(len(a.tokens) < 400 for a in running.answers)
    assert len(queued.wait()[0].tokens) == 5


def test_a_failed_forward_fails_its_requests_only(engine_of, base, monkeypatch) -> None:
    engine = engine_of(base)
    first = Asked(engine, prompt(1, 9), SampleParams(max_tokens=400))
    first.first.wait(30)
    monkeypatch.setattr(engine._forward, "decoder", lambda *_: 1 / 0)
    (answer,) = first.wait()
    monkeypatch.undo()
    assert answer.end is not None
    assert (answer.end.reason, answer.end.error) == ("error", "ZeroDivisionError: division by zero")
    assert engine.healthy
    assert len(Asked(engine, prompt(1, 9), SampleParams(max_tokens=4)).wait()[0].tokens) == 4


def test_running_out_of_memory_fails_the_request_only(engine_of, base, monkeypatch) -> None:
    engine = engine_of(base)

    def full(*_args: object, **_kwargs: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine._scheduler.adapters.current[None].filling, "reserve", full)
    (answer,) = Asked(engine, prompt(1, 9), SampleParams(max_tokens=4)).wait()
    assert answer.end is not None
    assert (answer.end.reason, answer.end.error) == ("error", "MemoryError: no room")
    monkeypatch.undo()
    assert len(Asked(engine, prompt(1, 9), SampleParams(max_tokens=4)).wait()[0].tokens) == 4


def test_nan_fails_and_does_not_spread(engine_of, base) -> None:
    reference = copy.deepcopy(base.model)
    engine = engine_of(base)
    weight = base.model.model.layers[0].self_attn.k_proj.weight
    good = weight.data.clone()
    first = Asked(engine, prompt(1, 9), SampleParams(max_tokens=400))
    first.first.wait(30)
    weight.data.fill_(float("nan"))
    (answer,) = first.wait()
    weight.data.copy_(good)
    assert answer.end is not None
    assert answer.end.reason == "error"
    assert "log-probability" in (answer.end.error or "")
    for i in range(3):
        again = Asked(engine, prompt(1, 9 + i), SampleParams(max_tokens=20))
        assert worst_difference(reference, again.prompt, again.wait()[0]) < CLOSE


def test_a_raising_callback_hurts_nobody_else(engine_of, base) -> None:
    engine = engine_of(base)
    good = Asked(engine, prompt(1, 9), SampleParams(max_tokens=400))

    def raises(_event: object) -> None:
        raise ConnectionError("client gone")

    engine.submit(SampleRequest(prompt(2, 9), SampleParams(max_tokens=400), None, raises))
    assert len(good.wait()[0].tokens) == 400
    assert engine.healthy


def test_stop_cancels_and_refuses(base) -> None:
    engine = SamplerEngine(base)
    engine.start()
    asked = Asked(engine, prompt(1, 9), SampleParams(max_tokens=500))
    asked.first.wait(30)
    engine.stop()
    (answer,) = asked.wait()
    assert answer.end is not None
    assert answer.end.reason == "cancelled"
    assert not engine.healthy
    with pytest.raises(RequestError, match="not running"):
        Asked(engine, prompt(1, 9), SampleParams(max_tokens=5))


def test_a_dead_thread_is_noticed(base) -> None:
    engine = SamplerEngine(base, after_round=lambda: 1 / 0)
    engine.start()
    (answer,) = Asked(engine, prompt(1, 9), SampleParams(max_tokens=50)).wait()
    assert answer.end is not None
    assert answer.end.reason == "error"
    assert engine._thread is not None
    engine._thread.join(10)
    assert not engine.healthy


@pytest.mark.parametrize("seed", range(3))
def test_anything_at_any_time(engine_of, base, tmp_path, seed) -> None:
    """Random arrivals, cancels, swaps, stops and a tight budget: nothing lost, leaked or wrong."""
    rng = random.Random(seed)
    references = {None: copy.deepcopy(base.model)}
    for version in range(1, 5):
        references[version] = make_adapter(base, tmp_path / f"v{version}", seed=version)
    engine = engine_of(
        base, kv_tokens=rng.choice([700, 1500, 10**5]), prefill_chunk=64, max_batch=9
    )
    engine.load_adapter("a", 1, tmp_path / "v1").result(30)
    engine.load_adapter("b", 2, tmp_path / "v2").result(30)
    stems = [prompt(i, 60) for i in range(3)]
    asked: list[Asked] = []
    cancelled: set[int] = set()
    for i in range(60):
        ids = rng.choice(stems)[: rng.randint(1, 60)] + prompt(i, rng.choice([0, 1, 8, 50]))
        params = SampleParams(
            max_tokens=rng.choice([1, 2, 20, 90]),
            n=rng.choice([1, 1, 1, 3]),
            temperature=rng.choice([0, 1, 1, 0.7]),
            top_p=rng.choice([1, 0.9]),
            stop_ids=frozenset(rng.sample(range(257), 3)),
            stop=rng.choice([(), ("e",)]),
        )
        asked.append(Asked(engine, ids, params, rng.choice([None, "a", "b"])))
        action = rng.random()
        if action < 0.1:
            version = rng.randint(1, 4)
            loaded = engine.load_adapter(rng.choice("ab"), version, tmp_path / f"v{version}")
            if action < 0.05:
                loaded.result(30)
        elif action < 0.2:
            cancelled.add(victim := rng.randrange(len(asked)))
            asked[victim].handle.cancel()
        elif action < 0.3:
            asked[-1].first.wait(30)
    for i, a in enumerate(asked):
        for answer in a.wait():
            assert answer.end is not None
            versions = {t.adapter_version for t in answer.tokens}
            assert len(versions) <= 1
            if answer.end.reason == "cancelled":
                assert i in cancelled
            else:
                assert answer.end.reason in ("stop", "length")
                assert (answer.end.reason == "stop") or len(answer.tokens) == a.params.max_tokens
            if answer.tokens:
                reference = references[versions.pop()]
                assert worst_difference(reference, a.prompt, answer) < 2 * CLOSE
    settle(engine)
    adapters = engine._scheduler.adapters
    assert sorted(lane.adapter or "" for lane in adapters.lanes) == ["", "a", "b"]
    assert all(lane.users == 0 for lane in adapters.lanes)
    held = sum(r.rows * r.time for x in adapters.lanes for r in (x.rows, x.filling))
    held += sum(len(e.kv) for x in adapters.lanes for e in x.prefixes.of(x))
    assert engine.stats().kv_tokens == held <= engine.stats().kv_budget
