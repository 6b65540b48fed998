"""Log-probs of chosen tokens under a causal language model, in float32.

Knows transformers models and micro-batches, nothing of adapters or losses. Two things make it
quick, and neither changes the result: the decoder runs over token tries (``tries.py``), and the
vocabulary, the widest thing in a model, is met only by the positions that train something, a chunk
at a time. Not every model allows both; which do is found out by looking (``why_padded``,
``why_all_logits``) rather than by knowing the families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl_trainer.data.packing import MicroBatch
from agentrl_trainer.models.loading import ModelError
from agentrl_trainer.models.prefix_attention import ATTENTION, Trie, pack_trie, why_no_flex
from agentrl_trainer.models.shrink_windows import shrunk_windows

MAX_LOGITS = 2**24
"""Most elements of logits held at once: 64 MB in float32."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [n, hidden] to logits [n, vocabulary]."""
Slope = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Hidden states [n, hidden], targets [n] and their temperatures [n] (None: all are 1) to the
targets' log-probs [n] in float32, and the gradient [n, hidden] of each with respect to its own
hidden state."""


class TokenLogprobs:
    """``MicroBatch -> [N]`` float32: the log-prob of each trained token given those before it,
    under logits / the temperature that the batch gives for the token (as TRL and verl do).

    ``why_padded`` and ``why_all_logits`` say what about this model forbids tries and chunks of
    logits, ``why_no_flex`` what forbids flex_attention over tries (a GPU's); none where they are
    used. Construction runs the model over a few tokens.

    Raises:
        ModelError: log-probs of the model depend on what comes later.
    """

    def __init__(self, model: PreTrainedModel, *, max_logits: int = MAX_LOGITS) -> None:
        if why := why_not_causal(model):
            raise ModelError(f"model: {model.config.model_type} cannot be trained: {why}.")
        self.model = model
        self.max_logits = max_logits
        self.why_all_logits = why_not_by_parts(model)
        self.why_padded = self.why_all_logits or why_no_tries(model)
        self.why_no_flex = self.why_padded or _why_no_flex(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        if self.why_all_logits is not None:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
            return _pick(logits.flatten(0, 1)[batch.places], batch.targets, batch.temperatures)
        return self.of_hidden(self.hidden(batch), batch.targets, batch.temperatures)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[N, hidden] the decoder's output where a trained token is predicted."""
        trie = batch.trie and replace(batch.trie, flex=not self.why_no_flex)
        return decoder_states(self.model, batch.input_ids, batch.position_ids, trie)[batch.places]

    def likeliest(self, batch: MicroBatch, count: int) -> tuple[Tensor, Tensor]:
        """[N, count] ids, and their log-probs at temperature 1, of the likeliest tokens where each
        trained one stands; best first."""
        if self.why_all_logits is not None:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
            parts = [logits.flatten(0, 1)[batch.places]]
        else:
            head, embedding = _head(self.model), _output_embedding(self.model)
            step = max(1, self.max_logits // embedding.weight.shape[0])
            parts = (head(part) for part in self.hidden(batch).split(step))  # one at a time
        found = [part.float().log_softmax(-1).topk(count) for part in parts]
        return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])

    def of_hidden(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """[N] the targets' log-probs, never holding more than ``max_logits`` logits."""
        head, embedding = _head(self.model), _output_embedding(self.model)
        step = max(1, self.max_logits // embedding.weight.shape[0])
        if not torch.is_grad_enabled():
            parts = _chunks(hidden, targets, temperatures, step)
            return torch.cat([_pick(head(h), t, warm) for h, t, warm in parts])
        if any(p.requires_grad for p in embedding.parameters()):
            return _recomputed(head, hidden, targets, temperatures, step)
        return cast(
            Tensor, _FrozenHead.apply(_slope(self.model), hidden, targets, temperatures, step)
        )


def _slope(model: PreTrainedModel) -> Slope:
    """How the log-probs and their gradients come about under this model's frozen head."""
    head, embedding = _head(model), _output_embedding(model)
    plain = type(embedding) is nn.Linear and embedding.bias is None
    if not plain or getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        return partial(_slope_by_autograd, head)
    return partial(_slope_in_place, embedding, _logit_factor(model))


def _slope_by_autograd(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        own = hidden.detach().requires_grad_()
        picked = _pick(head(own), targets, temperatures)
        (slope,) = torch.autograd.grad(picked.sum(), own)
    return picked.detach(), slope


def _slope_in_place(
    embedding: nn.Linear,
    factor: float,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a log-softmax is a one-hot vector less the softmax, which takes the place of
    the logits: a quarter of autograd's memory."""
    scale = factor if temperatures is None else (factor / temperatures)[:, None]
    scaled = temperatures is not None or factor != 1.0  # a pass over all logits
    logits = embedding(hidden).float()
    if scaled:
        logits *= scale
    logits -= logits.amax(-1, keepdim=True)
    picked = logits.gather(1, targets[:, None])[:, 0]
    total = logits.exp_().sum(-1)
    logits *= -1.0 / total[:, None]
    logits.scatter_add_(1, targets[:, None], torch.ones_like(picked)[:, None])
    if scaled:
        logits *= scale
    return picked - total.log(), logits.to(embedding.weight.dtype) @ embedding.weight


class _FrozenHead(torch.autograd.Function):
    """Log-probs through a head without trainable parameters.

    The log-prob of a row depends on no other row. So its gradient with respect to the row's hidden
    state is computed in the forward, while the logits are there, and the backward only scales it:
    logits are neither kept nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slope: Slope,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        step: int,
    ) -> Tensor:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        slopes = torch.empty_like(hidden)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            warm = None if temperatures is None else temperatures[part]
            logprobs[part], slopes[part] = slope(hidden[part], targets[part], warm)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return None, (slopes * grads[0][:, None]).to(slopes.dtype), None, None, None


def _recomputed(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, step: int
) -> Tensor:
    """Through a head that learns itself (LoRA on it): chunks are computed anew in the backward."""

    def logprobs(states: Tensor, tokens: Tensor, warm: Tensor | None) -> Tensor:
        return _pick(head(states), tokens, warm)

    return torch.cat(
        [
            cast(Tensor, checkpoint(logprobs, *part, use_reentrant=False))
            for part in _chunks(hidden, targets, temperatures, step)
        ]
    )


def _chunks(
    hidden: Tensor, targets: Tensor, temperatures: Tensor | None, step: int
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    parts = list(zip(hidden.split(step), targets.split(step), strict=True))
    warm = [None] * len(parts) if temperatures is None else list(temperatures.split(step))
    return [(h, t, w) for (h, t), w in zip(parts, warm, strict=True)]


def _pick(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return -F.cross_entropy(logits, targets, reduction="none")


def _output_embedding(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


def _head(model: PreTrainedModel) -> Head:
    """The output embedding, and what some families do to logits after it."""
    embedding = _output_embedding(model)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    factor = _logit_factor(model)

    def logits(hidden: Tensor) -> Tensor:
        found = embedding(hidden)
        if factor != 1.0:
            found = found * factor
        if cap is not None:
            found = torch.tanh(found / cap) * cap
        return found

    return logits


def _logit_factor(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return factor / (getattr(config, "logits_scaling", None) or 1.0)  # Granite


def decoder_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, trie: Trie | None
) -> Tensor:
    """[tokens, hidden] the decoder's output for ``input_ids.flatten()``."""
    if trie is None:
        output = model.get_decoder()(input_ids=input_ids, use_cache=False)
    else:
        # Others may have set theirs on the same model since (the embedded sampler does).
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        output = model.get_decoder()(
            input_ids=input_ids,
            position_ids=position_ids,
            # Never looked at; a 4-dimensional mask keeps transformers from making one.
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),
            use_cache=False,
            trie=trie,
        )
    return output.last_hidden_state.flatten(0, 1)


# ---- what a model allows

_REJECTS = (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError)
"""What models raise where they cannot be run so (NotImplementedError is a RuntimeError)."""


@torch.no_grad()
def why_not_causal(model: PreTrainedModel) -> str | None:
    """None if a row's logits depend on nothing behind or beside it, which padded rows rest on."""
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
    """None if logits are ``_head`` of the decoder's output, else why not.

    Some models do something of their own before or after the output embedding: one short pass
    tells.
    """
    probe = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        if model.get_decoder() in (model, None) or model.get_output_embeddings() is None:
            return "its decoder and output embedding are not to be had one by one"
        expected = model(input_ids=probe, use_cache=False).logits.flatten(0, 1)
        found = _head(model)(decoder_states(model, probe, probe, None))
    except _REJECTS as error:
        return f"its decoder cannot be run by itself: {error}"
    if not torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-4):
        return "it does something unknown to its logits"
    return None


@torch.no_grad()
def why_no_tries(model: PreTrainedModel) -> str | None:
    """None if the decoder computes a trie as it computes rows, else why not."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
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
        return "its attention does not tell its sliding window"
    scale = max(float(states.abs().max()) for states in expected)
    limit = 1e-4 if model.dtype == torch.float32 else 0.1
    for path, states in zip(packed.paths, expected, strict=True):
        worst = float((found[path] - states).abs().max())
        if not worst <= limit * max(scale, 1.0):
            return f"a trie's hidden states differ by {worst:.2g} from those of rows"
    return None


def _why_no_flex(model: PreTrainedModel) -> str:
    if model.device.type != "cuda":
        return "flex_attention has no gradients here"
    config = model.config.get_text_config()
    try:
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
    except RuntimeError as error:  # transformers refuses to name one for all layers
        return f"its layers have heads of several sizes: {error}"
    return why_no_flex(model.device, model.dtype, heads, groups, dim)


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return window is not None and getattr(config, "use_sliding_window", True)


def _length_dependent_rope(config: Any) -> str | None:
    """The kind of a rotary embedding whose frequencies follow the longest row of a batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    kinds = {p.get("rope_type") for p in [parameters, *nested]}
    return next((kind for kind in ("dynamic", "longrope") if kind in kinds), None)
