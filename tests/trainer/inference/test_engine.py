"""The sampler engine: every answer is what the model itself would have said."""

from __future__ import annotations

import copy
import gc
import random
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gateway import until
from small_models import (
    Asked,
    as_base,
    llama,
    make_adapter,
    qwen3,
    running_engine,
    settle,
    worst_difference,
)

from agentrl_trainer.inference import RequestError, SampleParams, SamplerEngine, SampleRequest
from agentrl_trainer.inference.adapter_swap import MergedWeights, PeftWeights
from agentrl_trainer.inference.sequences import Branch, Sequence
from agentrl_trainer.models.devices import on_own_thread
from agentrl_trainer.models.loading import load_base

CLOSE = 1e-5


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(256) for _ in range(length)]


def started(engine: SamplerEngine, **params: Any) -> Asked:
    asked = Asked(engine, prompt(1, 9), SampleParams(**params))
    asked.first.wait(30)
    return asked


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
    for wave in range(3):
        for i, name in enumerate((None, "planner", "player")):
            for length in (1, 5 + wave, 60):
                ids = shared[: 20 + 5 * wave] + prompt(wave * 10 + i, length)
                params = SampleParams(max_tokens=10 + 7 * i + wave, seed=wave)
                asked.append((Asked(engine, ids, params, name), name))
        asked[-1][0].first.wait(30)
    for a, name in asked:
        answer = a.one()
        assert (answer.end.reason, len(answer.tokens)) == ("length", a.params.max_tokens)
        assert answer.versions == {7 if name else None}
        assert worst_difference(references[name], a.prompt, answer) < CLOSE
    settle(engine)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.reused_tokens > 20 * 9


def test_without_a_seed_engines_draw_different_numbers(engine_of) -> None:
    params = SampleParams(max_tokens=16, temperature=2.0)
    first, other = (Asked(engine_of(as_base(qwen3())), prompt(1, 9), params) for _ in range(2))
    assert first.one().ids != other.one().ids


def test_group_shares_one_prefill(engine, reference) -> None:
    ids = prompt(2, 100)
    answers = Asked(engine, ids, SampleParams(max_tokens=12, n=6, seed=3)).wait()
    assert engine.stats().prefill_tokens == 100
    assert len({tuple(a.ids) for a in answers}) == 6
    assert all(worst_difference(reference, ids, a) < CLOSE for a in answers)
    # Six separate requests, a moment later: only the last token is computed again.
    before = engine.stats()
    group = [Asked(engine, ids, SampleParams(max_tokens=12)) for _ in range(6)]
    for g in group:
        assert worst_difference(reference, ids, g.one()) < CLOSE
    after = engine.stats()
    assert after.prefill_tokens - before.prefill_tokens <= 6
    assert after.reused_tokens - before.reused_tokens >= 6 * 99


def test_next_turn_reuses_the_conversation(engine, reference) -> None:
    ids = prompt(3, 30)
    for _ in range(4):
        before = engine.stats().reused_tokens
        answer = Asked(engine, ids, SampleParams(max_tokens=15)).one()
        assert worst_difference(reference, ids, answer) < CLOSE
        reused, length = engine.stats().reused_tokens - before, len(ids)
        ids = ids + answer.ids + prompt(4, 5)
    # All but the last answer's last token and the five new ones.
    assert reused == length - 6


def test_rollouts_share_a_stem(engine_of, base, reference, monkeypatch) -> None:
    """Rows hold what follows the stem: with copies of it, they would not fit into the budget."""
    monkeypatch.setattr("agentrl_trainer.inference.sequences._SHORTEST_STEM", 64)
    engine = engine_of(base, kv_tokens=1400, prefill_chunk=65)
    stem, used = prompt(3, 130), list[int]()
    rollouts = [stem + prompt(i, 5) for i in range(8)]
    for turn in range(3):
        params = SampleParams(max_tokens=11, seed=turn)
        asked = [Asked(engine, ids, params) for ids in rollouts]
        until(lambda last=asked[-1].answers[0]: len(last.tokens) > 1)  # all rows decode
        used.append(engine.stats().kv_tokens)
        for number, one in enumerate(asked):
            assert worst_difference(reference, one.prompt, one.one()) < CLOSE
            rollouts[number] = one.prompt + one.one().ids + prompt(number, 4)
    settle(engine)
    stats, [lane] = engine.stats(), engine._scheduler.lanes
    assert stats.prefill_tokens == 130 + 8 * (5 + 2 * 5)  # an answer's last token and 4 new ones
    assert stats.preemptions == 0
    assert max(used) < 1000 < 8 * 130
    assert [branch.first for branch in lane.branches] == [0, 130]
    # A group's prompt, of which all but the stem is new, is computed once and held once.
    group = Asked(engine, stem + prompt(9, 70), SampleParams(max_tokens=9, n=8)).wait()
    assert all(worst_difference(reference, stem + prompt(9, 70), a) < CLOSE for a in group)
    held = [weakref.ref(branch.stem.kv.keys) for branch in lane.branches[1:]]
    settle(engine)
    gc.collect()
    gc.disable()
    try:
        engine.drop_prefixes().result(30)
    finally:
        gc.enable()
    assert [branch.first for branch in lane.branches] == [0]
    assert engine.stats().kv_tokens == 0
    assert [keys() for keys in held] == [None] * len(held)


def test_seeded_tokens_do_not_depend_on_the_batch(engine) -> None:
    params = SampleParams(max_tokens=30, seed=11, n=2, top_p=0.95, temperature=0.8)
    alone = [a.ids for a in Asked(engine, prompt(5, 20), params).wait()]
    crowd = [Asked(engine, prompt(i, 10 + i), SampleParams(max_tokens=40)) for i in range(12)]
    crowd[0].first.wait(30)
    among = [a.ids for a in Asked(engine, prompt(5, 20), params).wait()]
    assert alone == among
    assert alone[0] != alone[1]
    other = Asked(engine, prompt(5, 20), SampleParams(max_tokens=30, seed=12))
    assert other.one().ids != alone[0]


def test_greedy_matches_generate(engine, reference) -> None:
    ids = prompt(6, 25)
    answer = Asked(engine, ids, SampleParams(max_tokens=20, temperature=0)).one()
    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer.ids == out[0, len(ids) :].tolist()


def test_stop_ids_and_top_logprobs(engine) -> None:
    params = SampleParams(max_tokens=50, seed=1, temperature=0, top_logprobs=3)
    free = Asked(engine, prompt(7, 9), params).one()
    stop = free.ids[4]
    stopped = Asked(engine, prompt(7, 9), replace(params, stop_ids=frozenset({stop}))).one()
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert (stopped.end.reason, stopped.end.stop) == ("stop", None)
    for token in free.tokens:
        assert len(token.top) == 3
        assert token.top[0] == pytest.approx((token.token_id, token.logprob))
        assert token.top[0][1] >= token.top[1][1] >= token.top[2][1]


def test_stop_string_across_tokens(engine, base) -> None:
    ids = Asked(engine, prompt(8, 9), SampleParams(max_tokens=60, seed=5)).one().ids
    text = base.tokenizer.decode(ids)
    start = next(i for i in range(20, 50) if text[i : i + 3].isascii())
    stop = text[start : start + 3]
    params = SampleParams(max_tokens=60, seed=5, stop=("zzz never", stop))
    answer = Asked(engine, prompt(8, 9), params).one()
    assert (answer.end.reason, answer.end.stop) == ("stop", stop)
    assert answer.ids == ids[: len(answer.ids)]
    assert base.tokenizer.decode(answer.ids).partition(stop)[1:] == (stop, "")


def test_the_youngest_is_preempted_and_still_agrees(
    engine_of, base, reference, monkeypatch
) -> None:
    """Not the one in the last row: the last one goes where another one ended."""
    youngest: list[tuple[int, int, int]] = []
    leave = Branch.leave

    def spy(branch: Branch, seq: Sequence, *, keep: bool = True) -> None:
        if not keep:
            seeds = [s.request.params.seed for s in branch.decoding]
            youngest.append((seq.request.params.seed, max(seeds), seeds[-1]))
        leave(branch, seq, keep=keep)

    monkeypatch.setattr(Branch, "leave", spy)
    engine = engine_of(base, kv_tokens=2500)
    asked = [
        Asked(engine, prompt(i, 33 - i), SampleParams(max_tokens=100 + i if i > 3 else 9, seed=i))
        for i in range(24)
    ]
    for a in asked:
        assert len(a.one().tokens) == a.params.max_tokens
        assert worst_difference(reference, a.prompt, a.one()) < CLOSE
    assert all(sent_back == newest for sent_back, newest, _ in youngest)
    assert any(newest != last for _, newest, last in youngest)
    settle(engine)
    assert engine.stats().preemptions >= len(youngest)
    assert engine.stats().kv_tokens <= 2500
    roomy = engine_of(as_base(reference))
    again = Asked(roomy, asked[-1].prompt, asked[-1].params).one()
    assert again.ids == asked[-1].one().ids


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


def test_the_context_length_ends_an_answer_as_max_tokens_does(engine_of, base) -> None:
    answer = Asked(engine_of(base), [1] * 500, SampleParams(max_tokens=100)).one()
    assert (answer.end.reason, len(answer.tokens)) == ("length", 12)


def test_long_prompt_does_not_starve_the_others(engine_of, base) -> None:
    engine = engine_of(base, prefill_chunk=16)
    running = started(engine, max_tokens=60)
    Asked(engine, prompt(2, 400), SampleParams(max_tokens=1)).wait()
    running.wait()
    # 25 chunks of 16, and the running sequence got a step between each two of them.
    assert engine.stats().prefill_steps >= 26
    assert engine.stats().decode_steps <= 60


def test_cancel(engine_of, base) -> None:
    engine = engine_of(base, max_batch=2)
    running = Asked(engine, prompt(1, 9), SampleParams(max_tokens=400, n=2))
    queued = Asked(engine, prompt(2, 9), SampleParams(max_tokens=5))
    running.first.wait(30)
    running.cancel()
    assert [a.end.reason for a in running.wait()] == ["cancelled", "cancelled"]
    assert all(len(a.tokens) < 400 for a in running.answers)
    assert len(queued.one().tokens) == 5


@pytest.mark.parametrize("what", ["forward", "memory"])
def test_a_failure_fails_its_requests_only(engine, monkeypatch, what) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise MemoryError("no room")

    first = started(engine, max_tokens=400) if what == "forward" else None
    if first:
        monkeypatch.setattr(engine._scheduler.forward, "_places", fail)
    else:
        monkeypatch.setattr(engine._scheduler.current[None].branches[0].filling, "reserve", fail)
    answer = (first or Asked(engine, prompt(1, 9), SampleParams(max_tokens=4))).one()
    assert (answer.end.reason, answer.end.error) == ("error", "MemoryError: no room")
    monkeypatch.undo()
    assert engine.healthy
    assert len(Asked(engine, prompt(1, 9), SampleParams(max_tokens=4)).one().tokens) == 4


def test_nan_fails_and_does_not_spread(engine, base, reference) -> None:
    weight = base.model.get_input_embeddings().weight
    good = weight.data.clone()
    first = started(engine, max_tokens=400)
    weight.data.fill_(float("nan"))
    answer = first.one()
    weight.data.copy_(good)
    assert "log-probability" in answer.end.error
    for i in range(3):
        again = Asked(engine, prompt(1, 9 + i), SampleParams(max_tokens=20))
        assert worst_difference(reference, again.prompt, again.one()) < CLOSE


def test_a_raising_callback_fails_no_other_request(engine) -> None:
    good = Asked(engine, prompt(1, 9), SampleParams(max_tokens=200))

    def raises(_event: object) -> None:
        raise ConnectionError("client gone")

    engine.submit(SampleRequest(prompt(2, 9), SampleParams(max_tokens=400), None, raises))
    assert len(good.one().tokens) == 200
    assert engine.healthy


def test_stop_cancels_and_refuses(engine) -> None:
    asked = started(engine, max_tokens=500)
    engine.stop()
    assert asked.one().end.reason == "cancelled"
    assert not engine.healthy
    with pytest.raises(RequestError, match="not running"):
        Asked(engine, prompt(1, 9), SampleParams(max_tokens=5))


def test_a_dead_thread_is_noticed(base) -> None:
    engine = SamplerEngine(base, after_round=lambda: 1 / 0)
    engine.start()
    asked = Asked(engine, prompt(1, 9), SampleParams(max_tokens=50))
    assert asked.one().end.reason == "error"
    engine._thread.join(10)
    assert not engine.healthy


@pytest.mark.parametrize(("seed", "shortest"), [(0, 512), (0, 20), (1, 20), (2, 20)])
def test_anything_at_any_time(engine_of, base, tmp_path, monkeypatch, seed, shortest) -> None:
    """Random arrivals, cancels, swaps, stops and a tight budget: nothing lost, leaked or wrong."""
    monkeypatch.setattr("agentrl_trainer.inference.sequences._SHORTEST_STEM", shortest)
    rng = random.Random(seed)
    references = {None: copy.deepcopy(base.model)}
    for version in range(1, 5):
        references[version] = make_adapter(base, tmp_path / f"v{version}", seed=version)
    engine = engine_of(base, kv_tokens=(700, 1500, 10**5)[seed], prefill_chunk=64, max_batch=9)
    engine.load_adapter("a", 1, tmp_path / "v1").result(30)
    engine.load_adapter("b", 2, tmp_path / "v2").result(30)
    stems = [prompt(i, 60) for i in range(3)]
    asked: list[Asked] = []
    cancelled: set[int] = set()
    for i in range(40):
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
            asked[victim].cancel()
        elif action < 0.3:
            asked[-1].first.wait(30)
    for i, a in enumerate(asked):
        for answer in a.wait():
            assert len(answer.versions) <= 1
            ends = {"stop", "cancelled"} if i in cancelled else {"stop"}
            assert answer.end.reason in ends or len(answer.tokens) == a.params.max_tokens
            assert answer.end.reason != "error"
            if answer.tokens:
                reference = references[answer.versions.pop()]
                assert worst_difference(reference, a.prompt, answer) < 2 * CLOSE
    settle(engine)
    lanes = engine._scheduler.lanes
    assert sorted(lane.adapter or "" for lane in lanes) == ["", "a", "b"]
    assert not any(lane.sequences for lane in lanes)
    branches = [branch for lane in lanes for branch in lane.branches]
    assert len(branches) == len(lanes) or shortest == 20
    held = sum(r.rows * r.time for x in branches for r in (x.rows, x.filling))
    held += sum(e.cost for x in lanes for e in x.pool.prefixes(x))
    assert engine.stats().kv_tokens == held <= engine.stats().kv_budget


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_thread_but_its_own_keeps_openmp_threads(tmp_path: Path) -> None:
    """With those of a thread that has loaded the model or an adapter, its own would sleep at every
    wait: see ``on_own_thread``."""
    make_adapter(load_base("agentrl-tiny", device="cpu"), tmp_path / "policy", 1)
    kept: list[int] = []

    def native() -> int:
        return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()

    def compute() -> None:
        torch.set_num_threads(2)
        before = native()
        base = on_own_thread(load_base, "agentrl-tiny", device="cpu")
        with running_engine(base) as engine:
            engine.load_adapter("policy", 1, tmp_path / "policy").result(30)
            Asked(engine, [*range(7, 200, 7)], SampleParams(max_tokens=2, n=8), "policy").wait()
            until(lambda: native() <= before + 1)  # those of threads that ended go soon
            kept.append(native() - before)

    threads = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    assert kept in ([0], [1])
