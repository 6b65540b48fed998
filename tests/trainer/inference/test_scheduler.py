"""A fault of one row ends that row alone: the others' answers are those without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from small_models import Asked, settle, worst_difference
from torch import Tensor

from agentrl_trainer.inference import SampleParams, SamplerEngine
from agentrl_trainer.inference.grammar import GrammarState
from agentrl_trainer.inference.kv_cache import KVRows, Part
from agentrl_trainer.inference.sequences import StopStrings

BAD = [255, 255, 255]
"""How the bad request's prompt begins, and no other."""


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(20 + seed)]


def others(engine: SamplerEngine) -> list[Asked]:
    """Requests of every kind of sampling."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}, {"top_k": 5, "n": 2},
        {"stop": ("never",)}, {"grammar": "start: /[a-z]{20,}/"}, {"logit_bias": ((3, 5.0),)},
    ]  # fmt: skip
    asked = [
        Asked(engine, prompt(i), SampleParams(max_tokens=25, seed=i, **kind))
        for i, kind in enumerate(kinds)
    ]
    asked[-1].first.wait(30)
    return asked


def ids_of(asked: list[Asked]) -> list[list[int]]:
    return [answer.ids for one in asked for answer in one.wait()]


def too_many_to_keep(monkeypatch: pytest.MonkeyPatch, engine: SamplerEngine) -> dict[str, Any]:
    """The parameter is beyond the range of a tensor, and nothing has refused it."""
    monkeypatch.setattr("agentrl_trainer.inference.engine.check_params", lambda params: None)
    return {"top_k": 2**63}


def stop_decoder(monkeypatch: pytest.MonkeyPatch, engine: SamplerEngine) -> dict[str, Any]:
    push = StopStrings.push

    def fail(self: StopStrings, token_id: int) -> str | None:
        if self._stop == ("bad",):
            raise ValueError("Invalid prefix encountered")
        return push(self, token_id)

    monkeypatch.setattr(StopStrings, "push", fail)
    return {"stop": ("bad",)}


def grammar(monkeypatch: pytest.MonkeyPatch, engine: SamplerEngine) -> dict[str, Any]:
    push = GrammarState.push

    def fail(self: GrammarState, token: int) -> bool:
        if not self.eos_ids:
            raise ValueError("the parser is too complex")
        return push(self, token)

    start = engine.grammars.start

    def marked(text: str) -> GrammarState:
        state = start(text)
        if text == "start: /[0-9]*/":
            state.eos_ids = frozenset()
        return state

    monkeypatch.setattr(GrammarState, "push", fail)
    monkeypatch.setattr(engine.grammars, "start", marked)
    return {"grammar": "start: /[0-9]*/"}


def fails_with(when: Callable[[list[list[int]]], bool]) -> Callable[..., dict[str, Any]]:
    """The forward fails when the bad request's row is in it."""

    def patch(monkeypatch: pytest.MonkeyPatch, engine: SamplerEngine) -> dict[str, Any]:
        forward = engine._scheduler.forward

        def fail(parts: list[Part]) -> list[Tensor]:
            for rows, chunks, *_ in parts:
                tokens = [owner.tokens for owner in rows.owners[: len(chunks)]]
                if any(one[:3] == BAD for one in tokens) and when(chunks):
                    raise RuntimeError("out of memory")
            return forward(parts)

        vars(fail).update(new_rows=forward.new_rows, ragged=forward.ragged)
        monkeypatch.setattr(engine._scheduler, "forward", fail)
        return {}

    return patch


def allocation(monkeypatch: pytest.MonkeyPatch, engine: SamplerEngine) -> dict[str, Any]:
    """No memory for the row of the bad request, when it begins to decode."""
    load = KVRows.load

    def fail(self: KVRows, row: int, source: Any, length: int) -> None:
        if self.owners[row].tokens[:3] == BAD:
            raise MemoryError("no room")
        load(self, row, source, length)

    monkeypatch.setattr(KVRows, "load", fail)
    return {}


@pytest.mark.parametrize(
    "fault",
    [
        too_many_to_keep,
        stop_decoder,
        grammar,
        fails_with(lambda chunks: any(len(chunk) > 1 for chunk in chunks)),
        fails_with(lambda chunks: all(len(chunk) == 1 for chunk in chunks)),
        allocation,
    ],
    ids=["parameters", "stop", "grammar", "prefill", "decode", "allocation"],
)
def test_a_fault_of_one_row_ends_that_row_alone(
    engine: SamplerEngine, reference: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    expected = ids_of(others(engine))
    params = {"max_tokens": 25} | fault(monkeypatch, engine)
    asked = others(engine)
    bad = Asked(engine, [*BAD, *prompt(50)], SampleParams(**params)).one()
    assert bad.end.reason == "error"
    assert "Error: " in (bad.end.error or "")
    assert ids_of(asked) == expected
    for one in asked:
        for answer in one.answers:
            assert answer.end.reason in ("length", "stop")
            assert worst_difference(reference, one.prompt, answer) < 1e-5
    settle(engine)
    assert engine.healthy
    assert [lane.most for lane in engine._scheduler.lanes] == [None]


def test_a_prompt_is_read_in_the_forward_that_decodes_the_others(
    engine: SamplerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, parts_of = engine._scheduler.forward, list[int]()

    def watched(parts: list[Part]) -> list[Tensor]:
        parts_of.append(len(parts))
        return forward(parts)

    vars(watched).update(new_rows=forward.new_rows, ragged=forward.ragged)
    monkeypatch.setattr(engine._scheduler, "forward", watched)
    first = Asked(engine, prompt(1), SampleParams(max_tokens=200))
    first.first.wait(30)
    Asked(engine, prompt(2), SampleParams(max_tokens=1)).wait()
    first.wait()
    # One forward for the first prompt, and no other but the steps of the first answer.
    assert parts_of == [1, *parts_of[1:]]
    assert parts_of.count(2) == 1
    assert len(parts_of) == len(first.one().ids)


def test_a_failure_that_comes_once_ends_nothing(
    engine: SamplerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(others(engine))
    forward, calls = engine._scheduler.forward, iter(range(10**6))

    def fail(parts: list[Part]) -> list[Tensor]:
        if next(calls) == 10:
            raise RuntimeError("out of memory")
        return forward(parts)

    vars(fail).update(new_rows=forward.new_rows, ragged=forward.ragged)
    monkeypatch.setattr(engine._scheduler, "forward", fail)
    asked = others(engine)
    assert ids_of(asked) == expected
    assert {answer.end.reason for one in asked for answer in one.answers} <= {"length", "stop"}
