"""Find out which ways of computing log-probs a model allows, by trying them on a few tokens.

There are four, each quicker than the one before and each with a function here that says when it
does not apply: the whole model on padded rows (``why_not_causal``), its decoder and output
embedding one by one (``why_not_by_parts``), the decoder on token tries (``why_no_tries``), and
tries under flex_attention (``why_no_flex``). Model families are too many to know them by name, and
their code may raise anything.

Trials are over short rows. So attention windows are shrunk meanwhile: one of 4,096 tokens would
have no effect there, and a way that ignores it would pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_trainer.models.prefix_attention import ATTENTION, Trie, pack_trie, trie_attention

_WINDOWS = (
    "sliding_window",
    "attention_chunk_size",  # Llama 4
    "index_topk",  # DeepSeek 3.2: keys that a query sees
    "floor_scale",  # Llama 4: positions from which on queries are scaled
    "keep_window_size",  # Doge
    "window_size",
)
_SHORT = 8
_ROUNDING = 3e-4
"""Most of the largest value that float32 may round away. Fine-tuned SmolLM2-135M, over tokens that
make no sense, comes to 1e-4."""


def decoder_states(model: PreTrainedModel, input_ids: Tensor, trie: Trie | None = None) -> Tensor:
    """Compute [tokens, hidden], the decoder's output for ``input_ids.flatten()``."""
    if trie is None:
        output = model.get_decoder()(input_ids=input_ids, use_cache=False)
    else:
        # The embedded sampler sets its own on the same model.
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        output = model.get_decoder()(
            input_ids=input_ids,
            position_ids=trie.depths[None],
            # Not read; a 4-dimensional mask keeps transformers from making one.
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),
            use_cache=False,
            trie=trie,
        )
    return output.last_hidden_state.flatten(0, 1)


@torch.no_grad()
def why_not_causal(model: PreTrainedModel) -> str | None:
    """Check that a row's logits do not depend on later tokens or other rows; None if so."""
    long = _probe(model)
    short = long[3:10]
    # Not by padding: some models mask that by themselves.
    padded = torch.stack([long, torch.cat([short, long[1:6]])])
    try:
        alone = [model(input_ids=x[None], use_cache=False).logits[0] for x in (long, short)]
        found = model(input_ids=padded, use_cache=False).logits
    except Exception as error:
        return f"its forward needs more than tokens: {type(error).__name__}: {error}"
    if any(_differ(row[: len(x)], x, _ROUNDING) for row, x in zip(found, alone, strict=True)):
        return "its log-probs depend on tokens that come later, so it is no causal model"
    return None


@torch.no_grad()
def why_not_by_parts(model: PreTrainedModel, head: Callable[[Tensor], Tensor]) -> str | None:
    """Check that logits are ``head`` of the decoder's output; None if so."""
    probe = _probe(model)[None]
    try:
        if model.get_decoder() in (model, None) or model.get_output_embeddings() is None:
            return "it does not expose its decoder and output embedding"
        expected = model(input_ids=probe, use_cache=False).logits.flatten(0, 1)
        found = head(decoder_states(model, probe))
    except Exception as error:
        return f"its decoder cannot be run by itself: {error}"
    if not torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-4):
        return "it does something unknown to its logits"
    return None


@torch.no_grad()
def why_no_tries(model: PreTrainedModel) -> str | None:
    """Check that the decoder computes a trie as it computes rows; None if so."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of {', '.join(odd)}"
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    if odd := sorted({"dynamic", "longrope"} & {rope.get("rope_type") for rope in ropes}):
        return f"its {odd[0]} rotary embedding depends on the length of the batch"
    before = cast(str, model.config._attn_implementation)
    long = _probe(model).tolist()
    rows = sorted([long, [*long[:7], *long[2:4]], [*long[:7], *long[5:11]], long[3:6]])
    tokens, paths, trie = pack_trie(rows)
    alone = [torch.tensor([row], device=model.device) for row in (*rows, tokens)]
    try:
        with shrunk_windows(model):
            expected = [decoder_states(model, row) for row in alone[:-1]]
            found = decoder_states(model, alone[-1], trie.to(model.device))
        pairs = zip(paths, expected, strict=True)
        if not any(_differ(found[path], states, _ROUNDING) for path, states in pairs):
            return None
        why = "a trie's hidden states differ from those of rows"
    except Exception as error:
        why = f"its attention rejects a trie: {error}"
    model.set_attn_implementation(before)
    return why


def why_no_flex(model: PreTrainedModel) -> str:
    """Check that flex_attention computes a trie as its blocks do, gradients too; "" if so.

    Compiles the kernels.
    """
    if model.device.type != "cuda":
        return "flex_attention has no gradients here"
    config = model.config.get_text_config()
    *_, trie = pack_trie([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8], [1, 9], [4, 4, 4, 4]])
    trie = trie.to(model.device)
    random = torch.Generator("cpu").manual_seed(0)
    found: list[list[Tensor]] = []
    try:
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        shapes = [(1, h, len(trie.ends), dim) for h in (heads, groups, groups)]
        drawn = (torch.randn(shape, generator=random) for shape in shapes)
        states = [x.to(model.device, model.dtype) for x in drawn]
        for flex in (False, True):
            own = q, k, v = [x.clone().requires_grad_() for x in states]
            with torch.enable_grad():
                out, _ = trie_attention(nn.Module(), q, k, v, None, trie=replace(trie, flex=flex))
                found.append([out, *torch.autograd.grad(out.float().square().sum(), own)])
    except Exception as error:  # also of transformers, where heads have several sizes
        return f"flex_attention cannot be used: {type(error).__name__}: {error}"
    if any(_differ(b, a, 2e-3, floor=1.0) for a, b in zip(*found, strict=True)):
        return "flex_attention computes something else"
    return ""


@contextlib.contextmanager
def shrunk_windows(model: nn.Module) -> Iterator[None]:
    """Set windows and the like to 8 tokens, in modules, configurations and stored masks (GPT-Neo).

    For comparisons only, and for one thread: the model computes something else meanwhile.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def change(own: dict[str, Any], name: str, value: Any) -> None:
        changed.append((own, name, own[name]))
        own[name] = value

    found = {id(x): vars(x) for m in model.modules() for x in (m, getattr(m, "config", None)) if x}
    for own in found.values():
        for name in own.keys() & _WINDOWS:
            value = own[name]
            if isinstance(value, (int, float)) and value > _SHORT:
                change(own, name, type(value)(_SHORT))
    for module in model.modules():
        masks = vars(module)["_buffers"]
        for name, mask in list(masks.items()):
            if mask is None or mask.dtype != torch.bool or mask.ndim < 2:
                continue
            square = mask.shape[-1] == mask.shape[-2] > _SHORT
            if square and not bool(mask[..., -1, 0].any()):  # the last does not see the first
                change(masks, name, mask & torch.ones_like(mask).triu(1 - _SHORT))
    try:
        yield
    finally:
        for own, name, value in changed:
            own[name] = value


def _probe(model: PreTrainedModel) -> Tensor:
    """Return twelve tokens from all over the vocabulary."""
    size = model.config.get_text_config().vocab_size
    return (torch.arange(12, device=model.device) * max(size // 16, 1) + 1) % size


def _differ(found: Tensor, expected: Tensor, limit: float, floor: float = 0.0) -> bool:
    """Tell whether values differ by more than ``limit`` of the largest, in float32."""
    limit = limit if expected.dtype == torch.float32 else 0.1
    scale = max(floor, float(expected.abs().max()))
    # NaN differs from everything.
    return not float((found.float() - expected.float()).abs().max()) <= limit * scale
