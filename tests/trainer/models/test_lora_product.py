"""A linear layer joined with its LoRA gives what PEFT's own sum gives."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora.layer import Linear
from small_models import as_base, llama, lora_b_from

from agentrl_trainer.models.lora import adapter_parameters, attach_adapter, lora_config
from agentrl_trainer.models.lora_product import LoraLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_peft(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = as_base(llama())
    base.model.to(dtype)
    model = attach_adapter(base, "policy", lora_config(4, 8), seed=1)
    lora_b_from(2, model)
    joined: list[int] = []
    monkeypatch.setattr(
        LoraLinear, "apply", lambda *args, _of=LoraLinear.apply: joined.append(1) or _of(*args)
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
    # An adapter of another precision than its layer's is left to PEFT.
    assert len(joined) == (len(layers) if dtype == torch.float32 else 0)
    for layer in layers:
        del layer.forward
    theirs = computed()
    assert len(ours) == len(theirs) == 1 + 2 * len(layers) == 29
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        assert not torch.equal(model(input_ids=ids).logits.float(), ours[0])
