"""Linear layers and MLPs joined with their LoRAs give what PEFT's own sums give."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora.layer import Linear
from small_models import as_base, llama, lora_b_from
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from agentrl_trainer.models.lora import adapter_parameters, attach_adapter, lora_config
from agentrl_trainer.models.lora_product import GatedLoraLinear, LoraLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_peft(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = as_base(llama())
    base.model.to(dtype)
    model = attach_adapter(base, "policy", lora_config(4, 8), seed=1)
    lora_b_from(2, model)
    joined: list[type] = []
    for kind in (LoraLinear, GatedLoraLinear):
        apply = kind.apply
        monkeypatch.setattr(
            kind, "apply", lambda *args, of=apply, kind=kind: joined.append(kind) or of(*args)
        )
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))

    def computed() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=ids).logits.float()
        logits.log_softmax(-1)[..., 7].sum().backward()
        own = adapter_parameters(model, "policy").values()
        return [logits.detach(), *(p.grad for p in own if p.grad is not None)]

    ours = computed()
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    mlps = [module for module in model.modules() if isinstance(module, LlamaMLP)]
    norms = [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]
    # An adapter of another precision than its layer's is left to PEFT.
    same = dtype == torch.float32
    assert joined.count(GatedLoraLinear) == (len(mlps) if same else 0)
    assert joined.count(LoraLinear) == (len(layers) - len(mlps) if same else 0)
    for module in [*layers, *mlps, *norms]:
        del module.forward
    theirs = computed()
    assert len(ours) == len(theirs) == 1 + 2 * len(layers) == 29
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        assert not torch.equal(model(input_ids=ids).logits.float(), ours[0])


def test_an_mlp_keeps_its_gates_and_nothing_else_of_their_size() -> None:
    model = attach_adapter(as_base(llama()), "policy", lora_config(4, 8), seed=1)
    mlp = next(module for module in model.modules() if isinstance(module, LlamaMLP))
    wide = mlp.gate_proj.base_layer.out_features
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1] == wide and tensor.shape[0] == 9:
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mlp(torch.randn(9, mlp.hidden_size, requires_grad=True))
    assert out.requires_grad
    assert len(kept) == 2


def test_a_merged_model_computes_what_it_did_with_its_adapter() -> None:
    model = attach_adapter(as_base(llama()), "policy", lora_config(4, 8), seed=1)
    lora_b_from(2, model)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, before)
