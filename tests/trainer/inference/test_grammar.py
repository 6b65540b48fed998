"""Grammars and biases while sampling: answers conform, and their neighbors do not change."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from small_models import Asked, running_engine, settle, worst_difference

from agentrl_trainer.inference import RequestError, SampleParams, SamplerEngine
from agentrl_trainer.inference.sampling import Steering, pick, uniforms
from agentrl_trainer.models.loading import BaseModel, load_base


def thing(**properties: dict[str, Any]) -> dict[str, Any]:
    closed = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": thing(
        brief_reason={"type": "string", "maxLength": 30}, yes_or_no={"enum": ["yes", "no", "n/a"]},
        correct={"type": "boolean"},
    ),
    "nested": {
        **thing(
            who=thing(age={"type": "integer", "minimum": 0, "maximum": 150}),
            next={"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        ),
        "$defs": {"point": thing(x={"type": "integer", "maximum": 9, "minimum": -9})},
    },
    "array": {
        "type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4,
    },
    "pattern": thing(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
}  # fmt: skip


def grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base("agentrl-tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(base: BaseModel) -> Any:
    return copy.deepcopy(base.model)


@pytest.fixture(scope="module")
def engine(base: BaseModel) -> Iterator[SamplerEngine]:
    with running_engine(base) as started:
        yield started


def test_a_known_grammar_starts_while_another_is_compiled(engine: SamplerEngine) -> None:
    known = grammar(SCHEMAS["enum"])
    engine.grammars.start(known)
    with ThreadPoolExecutor(1) as thread, engine.grammars._compiling:
        thread.submit(engine.grammars.start, known).result(timeout=30)


def ids_of(base: BaseModel, text: str) -> list[int]:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return base.tokenizer.encode(chat, add_special_tokens=False)


def params(base: BaseModel, **changed: Any) -> SampleParams:
    return SampleParams(**({"max_tokens": 300, "stop_ids": base.eos_ids} | changed))


def ask(engine: SamplerEngine, text: str, **changed: Any) -> Asked:
    return Asked(engine, ids_of(engine.base, text), params(engine.base, **changed))


def text_of(base: BaseModel, ids: list[int]) -> str:
    assert ids[-1] in base.eos_ids
    return str(base.tokenizer.decode(ids[:-1]))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_sample_conforms(engine, base, reference, name) -> None:
    schema = SCHEMAS[name]
    asked = ask(engine, "Who are you?", n=24, seed=5, grammar=grammar(schema))
    said = set[str]()
    for answer in asked.wait():
        assert answer.end.reason == "stop"
        text = text_of(base, answer.ids)
        jsonschema.validate(json.loads(text), schema)
        said.add(text)
        # The tiny model does not speak JSON by itself.
        assert -math.inf < answer.end.log_mass < -1
    assert len(said) > 5
    # What is reported is what the unmasked model gives each token.
    assert worst_difference(reference, asked.prompt, asked.answers[0]) < 1e-4


def test_log_mass_is_what_the_mask_left(engine, base, reference) -> None:
    """One token from two: their raw probabilities sum to the mass, and the draw follows them."""
    tokenizer = base.tokenizer
    [no], [yes] = (tokenizer.encode(w, add_special_tokens=False) for w in ("n", "y"))
    prompt = ids_of(base, "Is it a cat?")
    asked = Asked(engine, prompt, params(base, n=100, seed=1, grammar='start: "n" | "y"'))
    with torch.inference_mode():
        raw = reference(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    counts = {no: 0, yes: 0}
    for answer in asked.wait():
        first, last = answer.tokens
        counts[first.token_id] += 1
        assert math.isclose(first.logprob, raw[first.token_id].log().item(), abs_tol=1e-4)
        assert last.token_id in base.eos_ids
        with torch.inference_mode():
            after = reference(torch.tensor([[*prompt, first.token_id]])).logits[0, -1]
        ends = after.double().softmax(-1)[sorted(base.eos_ids)].sum().log().item()
        left = (raw[no] + raw[yes]).log().item() + ends
        assert math.isclose(answer.end.log_mass, left, abs_tol=1e-3)
    share = (raw[no] / (raw[no] + raw[yes])).item()
    assert abs(counts[no] / 100 - share) < 4 * math.sqrt(share * (1 - share) / 100) + 1e-6


def test_neighbors_get_the_same_tokens_and_logprobs(engine, base) -> None:
    free = params(base, n=3, seed=9, max_tokens=40, stop_ids=frozenset())
    warm = params(base, n=3, seed=8, temperature=0.7, top_p=0.9, max_tokens=40)
    prompts = [ids_of(base, f"Say you are {i}.") for i in range(8)]

    def together(grammar_: str | None) -> list[list[tuple[int, float]]]:
        others = params(base, n=4, seed=2, grammar=grammar_, max_tokens=40, stop_ids=frozenset())
        asked = [Asked(engine, p, free if i % 2 else warm) for i, p in enumerate(prompts)]
        crowd = Asked(engine, ids_of(base, "Hello"), others)
        answers = [answer for one in (crowd, *asked) for answer in one.wait()][others.n :]
        settle(engine)
        return [[(t.token_id, t.logprob) for t in answer.tokens] for answer in answers]

    # The letters "a" never end: as long-lived a neighbour as the unconstrained one.
    without, among = together(None), together("start: /a{200}/")
    assert [[i for i, _ in row] for row in without] == [[i for i, _ in row] for row in among]
    for before, after in zip(without, among, strict=True):
        assert max(abs(a - b) for (_, a), (_, b) in zip(before, after, strict=True)) < 1e-5


def test_a_pick_leaves_other_rows_bit_identical() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500) * 3
    settings = [
        SampleParams(1), SampleParams(1, temperature=0.5), SampleParams(1, top_p=0.8, top_k=40),
        SampleParams(1, temperature=0), SampleParams(1), SampleParams(1),
    ]  # fmt: skip
    allowed = torch.ones(2, 500, dtype=torch.bool)
    allowed[0] = torch.arange(500) == 77
    for step in range(50):
        plain = pick(logits, settings, [next(uniforms(step, i)) for i in range(6)])
        bias = (torch.tensor([3]), torch.tensor([100.0]))
        steering = Steering([4, 5], [None, bias], allowed)
        steered = pick(logits, settings, [next(uniforms(step, i)) for i in range(6)], steering)
        assert steered.ids[:4] == plain.ids[:4]
        assert steered.logprobs[:4] == plain.logprobs[:4]
        assert steered.ids[4:] == [77, 3]
        raw = logits.log_softmax(-1)
        assert steered.logprobs[4:] == [raw[4, 77].item(), raw[5, 3].item()]


def test_greedy_filters_stops_seed_and_siblings(engine, base) -> None:
    rules = grammar(SCHEMAS["array"])
    filtered = {"top_p": 0.3, "temperature": 1.7, "seed": 4}
    for changed in ({"temperature": 0.0}, {"top_k": 1, "seed": 3}, filtered):
        first, again = (ask(engine, "Hi", grammar=rules, n=2, **changed).wait() for _ in range(2))
        assert [a.ids for a in first] == [a.ids for a in again]
        for answer in first:
            jsonschema.validate(json.loads(text_of(base, answer.ids)), SCHEMAS["array"])
    cut = ask(engine, "Hi", grammar=rules, stop=(",",), seed=1).one()
    assert (cut.end.reason, cut.end.stop) == ("stop", ",")
    assert ask(engine, "Hi", grammar=rules, max_tokens=2).one().end.reason == "length"
    complete = ask(engine, "Hi", grammar='start: "yes"', stop_ids=frozenset()).one()
    assert (complete.end.reason, text_of(base, complete.ids)) == ("stop", "yes")


def test_preempted_answers_still_conform(base, reference) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 14}
    rules = grammar(schema)
    with running_engine(copy.copy(base), kv_tokens=500) as engine:
        options = {"grammar": rules, "max_tokens": 120}
        for a in [ask(engine, f"Count from {i}.", seed=i, **options) for i in range(10)]:
            answer = a.one()
            if answer.end.reason == "stop":
                jsonschema.validate(json.loads(text_of(base, answer.ids)), schema)
            assert worst_difference(reference, a.prompt, answer) < 1e-4
        assert engine.stats().preemptions > 0


def test_logit_bias(engine, base, reference) -> None:
    [wanted] = base.tokenizer.encode("z", add_special_tokens=False)
    [likeliest] = ask(engine, "Who are you?", max_tokens=1, temperature=0).one().ids
    banned = ask(engine, "Who are you?", max_tokens=1, n=50, logit_bias=((likeliest, -100.0),))
    assert likeliest not in {a.ids[0] for a in banned.wait()}
    forced = ask(engine, "Who are you?", max_tokens=4, logit_bias=((wanted, 100.0),))
    assert forced.one().ids == [wanted] * 4
    assert forced.one().end.log_mass is None
    assert worst_difference(reference, forced.prompt, forced.one()) < 1e-4
    # A grammar rules over a bias.
    both = ask(engine, "Who are you?", grammar='start: "yes"', logit_bias=((wanted, 100.0),))
    assert text_of(base, both.one().ids) == "yes"


def test_what_cannot_be_used_is_refused(engine) -> None:
    for bad in ("start: (", '{"grammars": [{"json_schema": {"type": "strin"}}]}'):
        with pytest.raises(RequestError) as refused:
            ask(engine, "Hi", grammar=bad)
        assert refused.value.code == "invalid_grammar"
    with pytest.raises(RequestError, match="logit_bias"):
        ask(engine, "Hi", logit_bias=((10**6, 1.0),))


def test_a_grammar_without_a_way_on_fails_alone(engine) -> None:
    """No text matches both: an error for this answer, none for its neighbor."""
    stuck = ask(engine, "Hi", grammar="start: A\nA: /a+/ & /b+/")
    fine = ask(engine, "Hi", max_tokens=5, stop_ids=frozenset())
    assert stuck.one().end.reason == "error"
    assert "grammar" in stuck.one().end.error
    assert len(fine.one().ids) == 5
