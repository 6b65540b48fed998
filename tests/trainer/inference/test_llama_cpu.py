"""The decoder of the Llama family: which models it decodes, and that adapters reach it."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import tiny_model
from small_models import Asked, as_base, llama, make_adapter, qwen3, worst_difference
from transformers import PreTrainedModel
from transformers.models.ministral3 import Ministral3Config, Ministral3ForCausalLM

from agentrl_trainer.inference import SampleParams, SamplerEngine
from agentrl_trainer.inference.cpu import linear_products
from agentrl_trainer.inference.cpu.linear_products import FusedLinear, Int8Linear
from agentrl_trainer.inference.kv_cache import Part
from agentrl_trainer.inference.llama_cpu import LlamaCpuForward
from agentrl_trainer.inference.prefix_cache import KVPool
from agentrl_trainer.inference.requests import RequestError
from agentrl_trainer.models.sources import ModelError


def ministral3() -> PreTrainedModel:
    return Ministral3ForCausalLM(
        Ministral3Config(
            vocab_size=257, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, intermediate_size=96, sliding_window=None,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "why_not"),
    [
        (lambda: tiny_model("gpt2"), {}, "its decoder has other parts"),
        # Gemma is made of the same parts, with another meaning: norms of 1 + weight.
        (lambda: tiny_model("gemma"), {}, "its logits differ by"),
        (ministral3, {}, "its queries are scaled by their positions"),
        (qwen3, {"merge_below": 0}, "it has 0 million parameters"),
        (lambda: qwen3().to(torch.bfloat16), {}, "its weights are bfloat16"),
    ],
)
def test_other_models_are_decoded_by_their_own_modules(make, options, why_not: str) -> None:
    engine = SamplerEngine(as_base(make()), **options)
    assert engine.strategy == "batched"
    assert engine.why_not_lean.startswith(why_not)


def test_a_part_of_each_head_is_not_rotated() -> None:
    forward = LlamaCpuForward(as_base(qwen3()), {})
    rotary = forward._rotary
    forward._rotary = lambda *given: [x[..., :4] for x in rotary(*given)]
    rows = forward.new_rows(KVPool(1000))
    rows.reserve(1, 20)
    with pytest.raises(ValueError, match="rotates a part"):
        forward([Part(rows, [[1, 2]], [0])])


def test_nothing_is_written_beyond_the_rows() -> None:
    forward = LlamaCpuForward(as_base(qwen3()), {})
    rows = forward.new_rows(KVPool(1000))
    rows.reserve(1, 20)
    for chunks, starts in ([[1] * (rows.time + 1)], [0]), ([[1]] * (rows.rows + 1), [0] * 9):
        with pytest.raises(AssertionError):
            forward([Part(rows, chunks, starts[: len(chunks)])])


def test_an_adapter_of_some_layers_comes_and_goes(engine, base, tmp_path: Path) -> None:
    """Of the layers whose weights are joined, only some are adapted."""
    plain = copy.deepcopy(base.model)
    adapted = make_adapter(base, tmp_path / "v1", 0, ["k_proj", "up_proj"])
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    for name, reference in (("policy", adapted), (None, plain), ("policy", adapted)):
        answer = Asked(engine, [1, 2, 3], SampleParams(max_tokens=150, seed=1), name).one()
        assert worst_difference(reference, [1, 2, 3], answer) < 2e-5
    assert worst_difference(plain, [1, 2, 3], answer) > 0.1  # it is no small adapter


def test_a_merge_that_fails_is_made_again(
    engine, base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = make_adapter(base, tmp_path / "v1", 0, ["k_proj", "up_proj"])
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    engine.drop_prefixes().result(30)

    def fails(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(LlamaCpuForward, "adapted", fails)
        failed = Asked(engine, [1, 2, 3], SampleParams(max_tokens=8), "policy").one()
    assert failed.end.reason == "error"
    answer = Asked(engine, [1, 2, 3], SampleParams(max_tokens=50, seed=1), "policy").one()
    assert worst_difference(adapted, [1, 2, 3], answer) < 2e-5


def test_merged_weights_are_freed_at_rest_and_made_again(engine, base, tmp_path: Path) -> None:
    plain = copy.deepcopy(base.model)
    adapted = make_adapter(base, tmp_path / "v1", 0, ["k_proj", "up_proj"])
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    asked = ("policy", adapted), (None, plain)
    lean = engine._scheduler.forward
    version = engine._scheduler.current["policy"].weights

    def check_both() -> None:
        for name, reference in asked:
            answer = Asked(engine, [1, 2, 3], SampleParams(max_tokens=50, seed=1), name).one()
            assert worst_difference(reference, [1, 2, 3], answer) < 2e-5

    check_both()
    assert version.products
    assert not version.weights, "nothing is held twice"
    assert lean._made
    engine.score([[1, 2, 3]], "policy").result(30)
    assert version.weights, "the model's modules score"
    engine.drop_prefixes().result(30)
    assert not any((version.weights, version.products, lean.products, lean._made))
    own = base.model.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(own, plain.model.layers[0].self_attn.k_proj.weight)
    check_both()

    running = Asked(engine, [1, 2, 3], SampleParams(max_tokens=400, seed=1), "policy")
    running.first.wait(30)
    engine.drop_prefixes().result(30)
    assert version.products, "they are in use"
    running.cancel()


def test_many_rows_of_mixed_lengths_while_an_adapter_is_swapped(
    engine_of, base, tmp_path: Path
) -> None:
    """Versions side by side."""
    references = {v: make_adapter(base, tmp_path / f"v{v}", seed=v) for v in (1, 2)}
    engine = engine_of(base, prefill_chunk=1024)
    draw = random.Random(0)
    asked: list[Asked] = []
    for version in (1, 2):
        engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
        for _ in range(40):
            length = draw.choice((draw.randint(1, 30), draw.randint(200, 300)))
            ids = [draw.randrange(256) for _ in range(length)]
            asked.append(
                Asked(engine, ids, SampleParams(max_tokens=draw.randint(10, 60)), "policy")
            )
        asked[-1 if version == 2 else 20].first.wait(30)
    for a in asked:
        answer = a.one()
        (version,) = answer.versions
        assert worst_difference(references[version], a.prompt, answer) < 1e-5
    assert set().union(*(a.one().versions for a in asked)) == {1, 2}


@pytest.fixture(params=["compiled", "torch"])
def library(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(linear_products, "_library", lambda *name: None)
    else:
        assert linear_products._library("linear_products") is not None
        if sys.platform == "linux":
            has_vnni = "avx512_vnni" in Path("/proc/cpuinfo").read_text()
            assert (linear_products._library("int8_products") is not None) == has_vnni


@pytest.mark.parametrize("rows", [*range(1, 10), 33, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_products_are_linear_layers(library, rows: int, bias: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Fewer outputs than a panel's; several panels; more inputs than are summed up in one go.
        for inputs, outputs in (24, [8, 16]), (1, [48, 96]), (1030, [70, 31]), (2100, [144]):
            weights = [torch.randn(n, inputs) for n in outputs]
            shift = torch.randn(sum(outputs)) if bias else None
            x, more = torch.randn(rows, inputs), torch.randn(rows, sum(outputs))
            expected = F.linear(
                x.double(), torch.cat(weights).double(), None if shift is None else shift.double()
            )
            product = FusedLinear(weights, shift)
            limit = 3e-7 * inputs + 1e-5
            assert (product(x) - expected).abs().max() < limit
            assert (product.plus(x, more) - expected - more).abs().max() < limit
            assert (
                product.plus(x.t().contiguous().t(), more) - expected - more
            ).abs().max() < limit
    finally:
        torch.set_num_threads(before)


def test_rounding_errors_do_not_grow_with_the_inputs() -> None:
    """In units of the outputs; a plain sum of 1,536 products is off by 7e-7."""
    assert linear_products._library("linear_products") is not None
    torch.manual_seed(0)
    weight, x = torch.randn(576, 1536) / 1536**0.5, torch.randn(64, 1536)
    apart = FusedLinear([weight], None)(x) - x.double() @ weight.double().t()
    assert apart.pow(2).mean().sqrt() < 4e-7


@pytest.mark.parametrize("kind", [FusedLinear, Int8Linear])
def test_what_is_no_number_shows_in_its_row(library, kind: type[FusedLinear | Int8Linear]) -> None:
    product = kind([torch.randn(100, 60)], None)
    x = torch.randn(9, 60)
    x[4, 7] = float("nan")
    x[8, 3] = float("inf")
    finite = product(x).isfinite()
    assert finite.all(1).tolist() == [row not in (4, 8) for row in range(9)]
    assert not finite[[4, 8]].any()


# ---- rounded weights


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("inputs", [96, 70])
@pytest.mark.parametrize("to", ["bfloat16", "int8"])
def test_products_round_the_weights_only(library, to: str, rows: int, inputs: int) -> None:
    torch.manual_seed(0)
    weights, bias = [torch.randn(48, inputs), torch.randn(16, inputs)], torch.randn(64)
    lora = (torch.randn(4, inputs), torch.randn(16, 4), 0.5)
    if to == "int8":
        product, close = Int8Linear(weights, bias), 1e-3
        step = torch.cat(weights).abs().amax(1, keepdim=True) / 127
        rounded = (torch.cat(weights) / step).round() * step
    else:
        product, close = FusedLinear(weights, bias, torch.bfloat16), 1e-5
        rounded = torch.cat(weights).bfloat16().float()
    # Rows of very different sizes, one of them zero.
    x = torch.randn(rows, inputs) * torch.logspace(-3, 2, rows)[:, None]
    x[1:2] = 0
    expected = x @ rounded.t() + bias
    limit = close * x.norm(dim=1, keepdim=True) + 1e-5
    assert ((product(x) - expected).abs() <= limit).all()
    assert ((x @ torch.cat(weights).t() + bias - expected).abs() <= limit).float().mean() < 0.9
    if to == "int8":  # inputs are rounded, too: each row by itself
        assert torch.equal(product(x)[:1], product(x[:1]))
    more = torch.randn(rows, 64)
    expected[:, 48:] += 0.5 * (x @ lora[0].t()) @ lora[1].t()
    found = product.adapted([None, lora]).plus(x, more)
    assert ((found - expected - more).abs() <= limit).all()


@pytest.mark.parametrize(
    ("weights", "trained", "least", "most"),
    [
        ("int8", torch.float32, 1e-4, 0.3),
        ("bfloat16", torch.float32, 1e-4, 0.3),
        ("bfloat16", torch.bfloat16, 0, 1e-5),  # the weights of most checkpoints: nothing is lost
    ],
)
def test_a_sampler_with_rounded_weights_stays_near_the_model(
    weights: Any, trained: torch.dtype, least: float, most: float, engine_of, tmp_path: Path
) -> None:
    base = as_base(qwen3().to(trained).float())
    plain = copy.deepcopy(base.model)
    adapted = make_adapter(base, tmp_path / "v1", 0, ["k_proj", "up_proj", "down_proj"])
    make_adapter(as_base(llama()), tmp_path / "other", 0, ["k_proj"])
    engine = engine_of(base, weights=weights)
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    for name, reference in ((None, plain), ("policy", adapted), (None, plain)):
        answer = Asked(engine, [1, 2, 3], SampleParams(max_tokens=60, seed=1), name).one()
        assert least <= worst_difference(reference, [1, 2, 3], answer) < most
    with pytest.raises(RequestError, match="scores no given tokens"):
        engine.score([[1, 2, 3]], None)
    with pytest.raises(ModelError, match="trained on another model"):
        engine.load_adapter("policy", 2, tmp_path / "other")


def test_other_models_have_no_rounded_weights() -> None:
    with pytest.raises(ModelError, match=r"cannot have int8 weights: its decoder has other parts"):
        SamplerEngine(as_base(tiny_model("gpt2")), weights="int8")
