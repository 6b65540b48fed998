"""Find out which ways of computing log-probs a model allows, by trying them on a few tokens.

There are four, each quicker than the one before and each with a function here that says when it
does not apply: the whole model on padded rows (``why_not_causal``), its decoder and output
embedding one by one (``why_not_by_parts``), the decoder on token tries (``why_no_tries``), and
tries under flex_attention (``why_no_flex``). Model families are too many to know them by name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_trainer.learner.output_head import logits_head
from agentrl_trainer.models import prefix_attention
from agentrl_trainer.models.prefix_attention import ATTENTION, Trie, pack_trie
from agentrl_trainer.models.shrink_windows import shrunk_windows

_REJECTS = (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError)
"""What models raise if they cannot be run so (NotImplementedError is a RuntimeError)."""


def decoder_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, trie: Trie | None
) -> Tensor:
    """Compute [tokens, hidden], the decoder's output for ``input_ids.flatten()``."""
    if trie is None:
        output = model.get_decoder()(input_ids=input_ids, use_cache=False)
    else:
        # The embedded sampler sets its own on the same model.
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        output = model.get_decoder()(
            input_ids=input_ids,
            position_ids=position_ids,
            # Not read; a 4-dimensional mask keeps transformers from making one.
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),
            use_cache=False,
            trie=trie,
        )
    return output.last_hidden_state.flatten(0, 1)


@torch.no_grad()
def why_not_causal(model: PreTrainedModel) -> str | None:
    """Check that a row's logits do not depend on later tokens or other rows; None if so."""
    size = model.config.get_text_config().vocab_size
    long = torch.arange(12, device=model.device) * max(size // 16, 1) % size
    short = long[3:10]
    # Not by padding: some models mask that by themselves.
    padded = torch.stack([long, torch.cat([short, long[1 : 1 + len(long) - len(short)]])])
    try:
        alone = [model(input_ids=x[None], use_cache=False).logits[0].float() for x in (long, short)]
        found = model(input_ids=padded, use_cache=False).logits.float()
    except _REJECTS as error:
        return f"its forward needs more than tokens: {type(error).__name__}: {error}"
    limit = 3e-4 if model.dtype == torch.float32 else 0.1
    scale = max(float(logits.abs().max()) for logits in alone)
    for row, logits in zip(found, alone, strict=True):
        if not float((row[: len(logits)] - logits).abs().max()) <= limit * scale:
            return "its log-probs depend on tokens that come later, so it is no causal model"
    return None


@torch.no_grad()
def why_not_by_parts(model: PreTrainedModel) -> str | None:
    """Check that logits are ``logits_head`` of the decoder's output; None if so."""
    probe = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        if model.get_decoder() in (model, None) or model.get_output_embeddings() is None:
            return "it does not expose its decoder and output embedding"
        expected = model(input_ids=probe, use_cache=False).logits.flatten(0, 1)
        found = logits_head(model)(decoder_states(model, probe, probe, None))
    except _REJECTS as error:
        return f"its decoder cannot be run by itself: {error}"
    if not torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-4):
        return "it does something unknown to its logits"
    return None


@torch.no_grad()
def why_no_tries(model: PreTrainedModel) -> str | None:
    """Check that the decoder computes a trie as it computes rows; None if so."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if kind := _length_dependent_rope(config):
        return f"its {kind} rotary embedding depends on the length of the batch"
    before = model.config._attn_implementation
    with shrunk_windows(model):
        why = _compare_trie(model, config)
    if why is not None:
        model.set_attn_implementation(cast(str, before))
    return why


def _compare_trie(model: PreTrainedModel, config: Any) -> str | None:
    step = max(config.vocab_size // 16, 1)
    long = [(at * step + 1) % config.vocab_size for at in range(12)]
    rows = sorted([long, [*long[:7], *long[2:4]], [*long[:7], *long[5:11]], long[3:6]])
    packed = pack_trie(rows)
    ids = torch.tensor([packed.tokens], device=model.device)
    depths = torch.tensor([packed.depths], device=model.device)
    trie = packed.trie.to(model.device)
    try:
        alone = [torch.tensor([row], device=model.device) for row in rows]
        expected = [decoder_states(model, row, row, None) for row in alone]
        found = decoder_states(model, ids, depths, trie)
    except _REJECTS as error:
        return f"its attention rejects a trie: {error}"
    if _slides(config) and not trie.knows_window(config.sliding_window):
        return "its attention does not pass its sliding window on"
    scale = max(float(states.abs().max()) for states in expected)
    limit = 1e-4 if model.dtype == torch.float32 else 0.1
    for path, states in zip(packed.paths, expected, strict=True):
        worst = float((found[path] - states).abs().max())
        if not worst <= limit * max(scale, 1.0):
            return f"a trie's hidden states differ by {worst:.2g} from those of rows"
    return None


def why_no_flex(model: PreTrainedModel) -> str:
    """Check that flex_attention computes tries of this model's heads; "" if so."""
    if model.device.type != "cuda":
        return "flex_attention has no gradients here"
    config = model.config.get_text_config()
    try:
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
    except RuntimeError as error:  # transformers refuses to name one for all layers
        return f"its layers have heads of several sizes: {error}"
    return prefix_attention.why_no_flex(model.device, model.dtype, heads, groups, dim)


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return window is not None and getattr(config, "use_sliding_window", True)


def _length_dependent_rope(config: Any) -> str | None:
    """Name a rotary embedding whose frequencies follow the longest row of a batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    kinds = {p.get("rope_type") for p in [parameters, *nested]}
    return next((kind for kind in ("dynamic", "longrope") if kind in kinds), None)
