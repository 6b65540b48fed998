"""An RMSNorm gives what transformers' own gives; layers that read it do not keep it."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora.layer import Linear
from small_models import as_base, llama, lora_b_from
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentrl_trainer.models.lora import attach_adapter, lora_config
from agentrl_trainer.models.rms_norm import RmsNorm, is_plain, join_norm


def norm_of(width: int) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width).requires_grad_(requires_grad=False)
    norm.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_the_output_is_the_same_and_the_gradient_right(scale: float) -> None:
    norm, draw = norm_of(64), torch.Generator().manual_seed(2)
    x, slope = (torch.randn(2, 50, 64, generator=draw) for _ in range(2))
    x = (x * scale).requires_grad_()
    made, _ = RmsNorm.apply(x, norm.weight, norm.variance_epsilon)
    assert torch.equal(made, norm(x))
    made.backward(slope)
    exact = x.detach().double().requires_grad_()
    root = (exact.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    (exact / root * norm.weight.double()).backward(slope.double())
    assert exact.grad is not None
    torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-5, atol=1e-5 / scale)


@pytest.mark.parametrize("change", [False, True])
def test_layers_make_their_input_again_unless_it_was_changed(change: bool) -> None:
    model = attach_adapter(as_base(llama()), "policy", lora_config(4, 8), seed=1)
    lora_b_from(2, model)
    norm = next(module for module in model.modules() if isinstance(module, LlamaRMSNorm))
    layers = [module for module in model.modules() if isinstance(module, Linear)][:3]
    given = torch.randn(1, 9, norm.weight.shape[0])

    def computed() -> tuple[int, list[Tensor | None]]:
        model.zero_grad()
        x = given.clone().requires_grad_()
        made = norm(x)
        if change:
            made.mul_(2.0)
        kept: set[int] = set()

        def keep(tensor: Tensor) -> Tensor:
            if tensor.shape[-2:] == given.shape[-2:]:
                kept.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = sum(layer(made).sum() for layer in layers)
        for _ in range(2):
            out.backward(retain_graph=True)
        weights = [layer.lora_A["policy"].weight for layer in layers]
        return len(kept - {x.data_ptr()}), [x.grad, *(weight.grad for weight in weights)]

    kept, (of_x, *of_weights) = computed()
    assert kept == change
    del norm.forward
    kept, (of_x_by_autograd, *of_weights_by_autograd) = computed()
    assert kept == 1
    torch.testing.assert_close(of_x, of_x_by_autograd, rtol=1e-5, atol=1e-5)
    for one, other in zip(of_weights, of_weights_by_autograd, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_no_plain_frozen_norm_is_left_to_transformers() -> None:
    assert is_plain(Qwen3RMSNorm(8))
    assert not any(is_plain(module) for module in (GemmaRMSNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)))
    norm, x = norm_of(8), torch.ones(3, 8, requires_grad=True)
    join_norm(norm)
    assert hasattr(norm(x), "agentrl_normed")
    with torch.no_grad():
        assert not hasattr(norm(x), "agentrl_normed")
    assert not hasattr(norm(x.bfloat16()), "agentrl_normed")
    norm.weight.requires_grad_()
    norm(x).sum().backward()
    assert norm.weight.grad is not None
