"""Log-probs of chosen tokens under a causal language model, in float32.

Knows transformers models, nothing of adapters or losses. A vocabulary is the widest thing in a
model, and most positions (prompts, padding) train nothing: so hidden states are picked first, and
only those go through the output embedding, in chunks whose logits are recomputed in the backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

MAX_LOGITS = 2**26
"""Most elements of logits held at once by the short way: 256 MB in float32."""


class TokenLogprobs:
    """``(input_ids [B, T], rows [N], columns [N], targets [N]) -> [N]`` float32.

    The n-th result is log p(targets[n] | input_ids[rows[n], : columns[n] + 1]). Right padding is
    fine, without attention mask, as attention is causal.
    """

    def __init__(self, model: PreTrainedModel, *, max_logits: int = MAX_LOGITS) -> None:
        self.model = model
        self.max_logits = max_logits
        self.short = head_is_plain(model)
        """Whether logits are the output embedding of the decoder's output and nothing else."""

    def __call__(self, input_ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> Tensor:
        if not self.short:
            logits = self.model(input_ids=input_ids, use_cache=False).logits
            return _gather(logits[rows, columns], targets)
        return self.of_hidden(self.hidden(input_ids, rows, columns), targets)

    def hidden(self, input_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """[N, hidden] the decoder's output where the targets are predicted."""
        decoder, _ = _parts(self.model)
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns]

    def of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[N] the targets' log-probs."""
        _, head = _parts(self.model)
        step = max(1, self.max_logits // head.weight.shape[0])
        if len(targets) <= step:
            return _head_logprobs(head, hidden, targets)
        chunks = zip(hidden.split(step), targets.split(step), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([_head_logprobs(head, *chunk) for chunk in chunks])
        return torch.cat(
            [
                cast(Tensor, checkpoint(_head_logprobs, head, *chunk, use_reentrant=False))
                for chunk in chunks
            ]
        )


def _head_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return _gather(head(hidden), targets)


def _gather(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def _parts(model: PreTrainedModel) -> tuple[nn.Module, Any]:
    return model.get_decoder(), model.get_output_embeddings()


@torch.no_grad()
def head_is_plain(model: PreTrainedModel) -> bool:
    """Look, rather than know the families: does anything happen around the output embedding?

    Some models scale logits or cap them (Gemma, Cohere, Granite, ...), or do something to the
    hidden states. One short pass shows what went into the head, and whether it came out unchanged.
    """
    try:
        decoder, head = _parts(model)
    except (AttributeError, NotImplementedError):
        return False
    if not isinstance(head, nn.Module) or decoder is model or decoder is None:
        return False
    seen: dict[str, Any] = {}

    def watch_decoder(_m: nn.Module, _args: Any, output: Any) -> None:
        seen["hidden"] = getattr(output, "last_hidden_state", None)

    def watch_head(_m: nn.Module, args: Any, output: Any) -> None:
        seen["head_in"], seen["head_out"] = args[0], output

    hooks = [decoder.register_forward_hook(watch_decoder), head.register_forward_hook(watch_head)]
    try:
        probe = torch.arange(8, device=model.device)[None]
        logits = model(input_ids=probe, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return (
        isinstance(seen.get("hidden"), Tensor)
        and isinstance(seen.get("head_in"), Tensor)
        and torch.equal(seen["hidden"], seen["head_in"])
        and torch.equal(seen["head_out"].float(), logits.float())
    )
