"""Mixtures of experts: what LoRA adapts, that it is computed right, and the way to a sampler."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel
from small_learner import one_step
from small_models import (
    Asked,
    as_base,
    qwen3,
    running_engine,
    save_model,
    training_row,
    worst_difference,
)
from torch import Tensor

from agentrl_trainer.client import ServiceClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference import SampleParams, SamplerEngine
from agentrl_trainer.inference.adapter_swap import read_lora
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter
from agentrl_trainer.models.lora_targets import no_false_warnings
from agentrl_trainer.models.moe import grouped
from agentrl_trainer.models.sources import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **SMALL, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 40}
RANK, ALPHA = 4, 8
Make = Callable[[], hf.PreTrainedModel]


def _made(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model.eval().requires_grad_(False)


qwen3_moe = partial(_made, hf.Qwen3MoeConfig(**QWEN, head_dim=16, norm_topk_prob=True))
mixtral = partial(_made, hf.MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4))
olmoe = partial(_made, hf.OlmoeConfig(**SMALL, intermediate_size=24, num_experts=4))
# A dense layer first, and beside the experts of the second one that every token meets.
qwen2_moe = partial(_made, hf.Qwen2MoeConfig(**QWEN, **SHARED, mlp_only_layers=[0]))
# A mixture whose layers have no experts.
dense_layers = partial(_made, hf.Qwen2MoeConfig(**QWEN, **SHARED, mlp_only_layers=[0, 1]))
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GPT_OSS = {"head_dim": 16, "intermediate_size": 24, "num_local_experts": 4}
# Experts with biases, stored the other way round; not for the embedded sampler.
gpt_oss = partial(_made, hf.GptOssConfig(**SMALL, **GPT_OSS, rope_parameters=ROPE))
STEM = "base_model.model."
EXPERTS = {"mlp.experts", "mlp.experts.base_layer"}
SERVED = [qwen3_moe, mixtral, olmoe, qwen2_moe]
EVERY = [*SERVED, gpt_oss]


def adapted(model: hf.PreTrainedModel, targets: str | list[str] = "all-linear") -> PeftModel:
    """A copy with a random adapter, far from nothing."""
    base = as_base(copy.deepcopy(model))
    peft = attach_adapter(base, "policy", lora_config(RANK, ALPHA, targets), seed=0)
    become_random(peft)
    return peft


def become_random(peft: PeftModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, weight in peft.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=generator)


def as_peft_computes(model: PeftModel) -> PeftModel:
    """A copy that adds the update to the weights in every forward."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.__dict__.pop("forward", None)
    return plain


def assert_as_peft_computes(peft: PeftModel) -> None:
    ids = tokens(2, 9)
    assert worst(peft(ids).logits, as_peft_computes(peft)(ids).logits) < 1e-5


def lora(peft: PeftModel, module: str) -> tuple[Tensor, Tensor]:
    a, b = (peft.get_parameter(f"{STEM}{module}.lora_{x}.policy.weight") for x in "AB")
    return a, b


def with_weights_merged(peft: PeftModel, model: hf.PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits under W + alpha / r * B A, which autograd goes through; experts one by one."""
    own = copy.deepcopy(model)
    own.set_experts_implementation("eager")
    weights = {name: p.detach() for name, p in own.named_parameters()}
    keys = [key for key, _ in peft.named_parameters() if ".lora_A." in key]
    for module in (key.removeprefix(STEM).partition(".lora_A.")[0] for key in keys):
        a, b = lora(peft, module)
        path, inner, _ = module.partition(".base_layer")
        name, rank, updates = f"{path}.weight", len(a), [b @ a]
        if path.endswith(".experts"):
            name = f"{path}.{'gate_up_proj' if inner else 'down_proj'}"
            count = len(weights[name])
            rank = len(a) // count
            own_a, own_b = a.split(rank), [b[:, e::count] for e in range(count)]  # B alternates
            updates = [x @ y for x, y in zip(own_b, own_a, strict=True)]
            updates = [x.T if isinstance(own, hf.GptOssForCausalLM) else x for x in updates]
        update = torch.stack(updates).view_as(weights[name])
        weights[name] = weights[name] + ALPHA / rank * update
    return torch.func.functional_call(own, weights, (ids,)).logits


def adapted_modules(model: torch.nn.Module, layer: int) -> set[str]:
    """What trains in a layer, by its path from there on."""
    stems = {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    return {s.rpartition(f"layers.{layer}.")[2] for s in stems if f"layers.{layer}." in s}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 257, shape, generator=torch.Generator().manual_seed(seed))


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


# ---- what is adapted


@pytest.mark.parametrize("make", EVERY)
def test_experts_are_adapted_and_routers_are_not(make: Make) -> None:
    model = make()
    peft = attach_adapter(as_base(model), "policy", lora_config(RANK, ALPHA), seed=0)
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    expected = attention | EXPERTS
    if make is qwen2_moe:
        expected |= {f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
        dense = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
        assert adapted_modules(peft, 0) == attention | dense
    assert adapted_modules(peft, 1) == expected
    # Two experts for each token: half of the rank each, and the whole rank elsewhere.
    for stem, rows in (("mlp.experts", 4 * RANK // 2), ("self_attn.q_proj", RANK)):
        assert lora(peft, f"model.layers.1.{stem}")[0].shape[0] == rows
    assert torch.equal(peft(tokens(1, 9)).logits, make()(tokens(1, 9)).logits)  # B is zero


@pytest.mark.parametrize(
    ("make", "targets", "expected"),
    [
        (qwen3_moe, ["model.layers.1.mlp.experts.down_proj"], {"1.mlp.experts"}),
        (qwen3_moe, ["layers.1.mlp.experts.gate_up_proj"], {"1.mlp.experts"}),
        (qwen3_moe, ["1.mlp.gate_proj", "1.mlp.up_proj"], {"1.mlp.experts"}),
        (qwen3_moe, r".*layers\.1\..*(q_proj|experts.*)",
         {"1.self_attn.q_proj", *(f"1.{x}" for x in EXPERTS)}),
        (qwen3_moe, ["mlp.experts.down_proj"], {"0.mlp.experts", "1.mlp.experts"}),
        (dense_layers, ["model.layers.0.mlp.up_proj", "o_proj"],
         {"0.mlp.up_proj", "0.self_attn.o_proj", "1.self_attn.o_proj"}),
        (dense_layers, r".*layers\.1\.mlp\.down_proj", {"1.mlp.down_proj"}),
        (dense_layers, ["up_proj"], {"0.mlp.up_proj", "1.mlp.up_proj"}),
        *((qwen3_moe, ["q_proj", *fused],
           {f"{x}.{part}" for x in "01" for part in ("mlp.experts", "self_attn.q_proj")})
          for fused in (["gate_proj", "up_proj"], ["gate_up_proj"])),
    ],
)  # fmt: skip
def test_targets_of_one_layer_train_that_layer(
    make: Make, targets: str | list[str], expected: set[str], tmp_path: Path
) -> None:
    learner = Learner(as_base(make()), rank=RANK, alpha=ALPHA, targets=targets)
    found = {f"{x}.{part}" for x in (0, 1) for part in adapted_modules(learner.model, x)}
    assert found == expected
    layers = len({n[0] for n in expected if "experts" in n})
    if layers:
        said = learner.what_is_trained("default") or ""
        assert f"experts in {layers} layers has a LoRA of rank {RANK // 2}" in said
    become_random(learner.model)
    assert_as_peft_computes(learner.model)
    folder = tmp_path / "one layer"
    save_adapter(learner.model, "default", folder)
    assert len(read_lora(folder)) == len(expected)
    with no_false_warnings():
        loaded = PeftModel.from_pretrained(make(), str(folder))
    assert worst(learner.model(tokens(1, 9)).logits, loaded(tokens(1, 9)).logits) < 1e-5


def test_a_router_that_is_a_linear_layer_is_left_alone() -> None:
    model = _made(hf.AfmoeConfig(**QWEN, head_dim=8, num_dense_layers=1))
    assert isinstance(model.get_submodule("model.layers.1.mlp.router.gate"), torch.nn.Linear)
    peft = adapted(model)
    found = adapted_modules(peft, 1)
    assert not [name for name in found if "router" in name]
    assert {"mlp.experts", "mlp.shared_experts.up_proj"} <= found
    assert_as_peft_computes(peft)


def test_a_learner_says_what_it_trains() -> None:
    for targets, expected in (
        ("all-linear", "each of the 4 experts in 2 layers has a LoRA of rank 2; routers stay"),
        (["q_proj"], "the 4 experts of a layer are in no weight that LoRA was put on; routers"),
    ):
        learner = Learner(as_base(mixtral()), rank=RANK, targets=targets)
        assert ("mlp.experts" in adapted_modules(learner.model, 1)) == (targets == "all-linear")
        assert (learner.what_is_trained("default") or "").startswith(expected)
    assert Learner(as_base(qwen3()), rank=RANK).what_is_trained("default") is None


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (qwen2_moe, ["shared_expert_gate"], "chooses the experts, and routers are not trained"),
        (qwen3_moe, ["gate_proj"], "gate_proj and up_proj of the experts are one weight"),
        (mixtral, ["w1"], "w1 and w3 of the experts are one weight"),
        (mixtral, ["q_prj"], "'q_prj' is nothing to train here; there is down_proj, gate_up_proj"),
    ],
)
def test_targets_that_cannot_be(make: Make, targets: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        attach_adapter(as_base(make()), "policy", lora_config(RANK, ALPHA, targets), seed=0)


def test_adapters_over_one_mixture_have_the_same_experts() -> None:
    peft = adapted(qwen3_moe())
    attach_adapter(peft, "judge", lora_config(8, ALPHA), seed=1)  # another rank is fine
    for name in ("policy", "judge"):
        peft.set_adapter(name)
        assert_as_peft_computes(peft)
    with pytest.raises(ModelError, match=r"'third' cannot join the others.*same set of"):
        attach_adapter(peft, "third", lora_config(4, ALPHA, ["down_proj"]), seed=1)


# ---- that it is computed right


@pytest.mark.parametrize("make", EVERY)
def test_log_probs_and_gradients_are_those_of_merged_weights(make: Make) -> None:
    model, ids = make(), tokens(2, 24)
    peft = adapted(model)
    trained = {n: p for n, p in peft.named_parameters() if p.requires_grad}
    way = torch.randn(2, 24, 257, generator=torch.Generator().manual_seed(4))

    def computed(logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        lps = logits.log_softmax(-1)
        return lps, list(torch.autograd.grad((lps * way).mean(), trained.values()))

    expected, slopes = computed(with_weights_merged(peft, model, ids))
    lps, found = computed(peft(ids).logits)
    assert worst(lps, expected) < 1e-5
    assert worst(as_peft_computes(peft)(ids).logits.log_softmax(-1), expected) < 1e-5
    for name, a, b in zip(trained, found, slopes, strict=True):
        assert float(b.abs().max()) > 0, name
        assert worst(a, b) < 1e-5 * max(1.0, float(b.abs().max())), name
    with peft.disable_adapter():
        base = peft(ids).logits
    assert worst(base, model(ids).logits) < 1e-5
    assert worst(base.log_softmax(-1), expected) > 0.1  # it is no small adapter


def test_adapters_of_a_base_in_half_precision_are_float32() -> None:
    model, ids = qwen3_moe(), tokens(2, 24)
    peft = adapted(qwen3_moe().bfloat16())
    dtypes = {p.dtype for n, p in peft.named_parameters() if "lora_" in n}
    assert dtypes == {torch.float32}
    with torch.no_grad():
        models = (peft, adapted(model), model)
        half, whole, base = (one(ids).logits.float().log_softmax(-1) for one in models)
    # Some tokens go to other experts: the mean tells.
    assert float((half - whole).abs().mean()) < 0.05
    assert float((whole - base).abs().mean()) > 0.3


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("inner", "outer"), [(8, 8), (5, 3), (32, 1)])
def test_grouped_products_of_any_size(
    dtype: torch.dtype, within: float, inner: int, outer: int
) -> None:
    """Kernels want rows of 16 bytes; an expert may have no token."""
    x = torch.randn(10, inner, dtype=dtype, requires_grad=True)
    w = torch.randn(4, outer, inner, dtype=dtype, requires_grad=True)
    found = grouped(x, w.transpose(1, 2), torch.tensor([3, 3, 7, 10], dtype=torch.int32))
    expected = torch.cat((x[:3] @ w[0].T, x[3:7] @ w[2].T, x[7:] @ w[3].T))
    way = torch.randn(10, outer, dtype=dtype)
    ours, theirs = (torch.autograd.grad(y, (x, w), way) for y in (found, expected))
    for a, b in ((found, expected), *zip(ours, theirs, strict=True)):
        assert worst(a, b) < within


# ---- learning


def datums() -> list[TrainingRow]:
    """A group over one prompt, and a conversation's second turn over the first."""
    prompt = tokens(20).tolist()
    answers = [(prompt + tokens(6 + s, seed=s + 1).tolist(), 20, 1.0 - s) for s in range(3)]
    longer = (answers[0][0] + tokens(8, seed=9).tolist(), 30, 0.5)
    return [training_row(*each) for each in (*answers, longer)]


@pytest.mark.parametrize("make", SERVED)
def test_trained_published_and_sampled_is_one_policy(make: Make, tmp_path: Path) -> None:
    """Two versions in one batch."""
    model = make()
    learner = Learner(
        as_base(copy.deepcopy(model)), rank=RANK, alpha=ALPHA, adam=AdamParams(learning_rate=2e-2)
    )
    for _ in range(2):
        assert not one_step(learner, datums(), "cross_entropy").skipped_non_finite
    save_adapter(learner.model, "default", tmp_path / "v1")
    first = copy.deepcopy(learner.model)
    one_step(learner, datums(), "cross_entropy")
    save_adapter(learner.model, "default", tmp_path / "v2")
    with running_engine(as_base(copy.deepcopy(model))) as engine:
        engine.load_adapter("old", 1, tmp_path / "v1").result(30)
        engine.load_adapter("new", 2, tmp_path / "v2").result(30)
        how = SampleParams(max_tokens=40, seed=1)
        prompt = tokens(12).tolist()
        asked = [Asked(engine, prompt, how, name) for name in ("old", "new", None, "new")]
        for one, reference in zip(asked, (first, learner.model, model), strict=False):
            assert worst_difference(reference, prompt, one.one()) < 1e-5
        ids = [*prompt, *asked[1].one().ids]
        (scored,) = engine.score([ids], "new").result(30)
    (expected,) = learner.forward([training_row(ids)])
    assert scored.logprobs[1:] == pytest.approx(expected[1:], abs=1e-5)
    prompt_only = learner.model(torch.tensor([prompt])).logits
    assert worst(prompt_only, model(torch.tensor([prompt])).logits) > 0.1  # it has learnt something


# ---- files


def test_an_adapter_of_another_mixture_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted(qwen3_moe()), "policy", tmp_path / "v1")
    smaller = _made(hf.Qwen3MoeConfig(**{**QWEN, "moe_intermediate_size": 16}, head_dim=16))
    with (
        running_engine(as_base(smaller)) as engine,
        pytest.raises(ModelError, match="does not fit this"),
    ):
        engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    dense = SamplerEngine(as_base(qwen3()))
    with pytest.raises(ModelError, match=r"adapts 'model.layers.0.mlp.experts"):
        dense.load_adapter("policy", 1, tmp_path / "v1")
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {
        r"experts\.down_proj": RANK // 2, r"experts\.gate_up_proj": RANK // 2
    }  # fmt: skip


def test_a_client_trains_attention_or_experts_alone(tmp_path: Path) -> None:
    base = save_model(qwen2_moe(), tmp_path / "base")
    mlps = {"gate_proj", "up_proj", "down_proj", "experts", "base_layer"}
    for which, expected in (("train_mlp", {f"{x}_proj" for x in "qkvo"}), ("train_attn", mlps)):
        service = ServiceClient(folder=tmp_path / which, device="cpu")
        client = service.create_lora_training_client(base, RANK, 0, **{which: False})
        names = client.local(
            lambda learner: [n for n, p in learner.model.named_parameters() if p.requires_grad]
        ).result()
        assert {n.split(".lora_")[0].rpartition(".")[2] for n in names} == expected
