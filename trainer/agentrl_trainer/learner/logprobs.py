"""Compute log-probs of chosen tokens under a causal language model, in float32.

Knows transformers models and micro-batches, nothing of adapters or losses. Two things make it
quick, and neither changes the result: the decoder runs over token tries (``prefix_attention``), and
only positions that train something meet the vocabulary, the widest dimension of a model, a chunk of
them at a time. ``model_support`` finds out whether a model allows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl_trainer.data.packing import MicroBatch
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.model_support import (
    decoder_states,
    why_no_flex,
    why_no_tries,
    why_not_by_parts,
    why_not_causal,
)
from agentrl_trainer.models.prefix_attention import Trie
from agentrl_trainer.models.sources import ModelError

MAX_LOGITS = 2**24
"""Most elements of logits held at once: 64 MB in float32."""


class TokenLogprobs:
    """``MicroBatch -> [N]`` float32: the log-prob of each trained token given those before it,
    under logits / the temperature that the batch gives for the token (as in TRL and verl).

    ``why_all_logits``, ``why_padded`` and ``why_no_flex`` say what about this model forbids chunks
    of logits, tries, and tries under flex_attention (on a GPU); they are empty or None if used.
    Construction runs the model over a few tokens.

    Raises:
        ModelError: log-probs of the model depend on later tokens.
    """

    def __init__(self, model: PreTrainedModel, *, max_logits: int = MAX_LOGITS) -> None:
        if why := why_not_causal(model):
            raise ModelError(f"model: {model.config.model_type} cannot be trained: {why}.")
        self.model = model
        self.max_logits = max_logits
        self.why_all_logits = why_not_by_parts(model, OutputHead(model))
        self.why_padded = self.why_all_logits or why_no_tries(model)
        self.why_no_flex = self.why_padded or why_no_flex(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        if self.why_all_logits is not None:
            return pick(self._all_logits(batch), batch.targets, batch.temperatures)
        return self.of_hidden(self.hidden(batch), batch.targets, batch.temperatures)

    def of_temperature(self, batch: MicroBatch) -> Tensor:
        """Compute [N] what the temperatures add to the targets' log-probs at temperature 1."""
        if self.why_all_logits is not None:
            logits = self._all_logits(batch)
            return pick(logits, batch.targets, batch.temperatures) - pick(logits, batch.targets)
        hidden = self.hidden(batch)
        warm = self.of_hidden(hidden, batch.targets, batch.temperatures)
        return warm - self.of_hidden(hidden, batch.targets)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Compute [N, hidden], the decoder's output from which each trained token is predicted."""
        # Places repeat where rows share a prefix. An embedding's backward adds them in one order,
        # an index's does not with several threads.
        return F.embedding(batch.places, self.states(batch.input_ids, batch.trie))

    def states(self, input_ids: Tensor, trie: Trie | None) -> Tensor:
        """Compute [tokens, hidden], the decoder's output for all tokens."""
        trie = trie and replace(trie, flex=not self.why_no_flex)
        return decoder_states(self.model, input_ids, trie)

    def of_hidden(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """Compute [N] the targets' log-probs, never holding more than ``max_logits`` logits."""
        head, step = self._head()
        if torch.is_grad_enabled() and head.is_frozen_linear:
            return cast(Tensor, FrozenHead.apply(head, hidden, targets, temperatures, step))

        def logprobs(hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> Tensor:
            return pick(head(hidden), targets, temperatures)

        warm = repeat(None) if temperatures is None else temperatures.split(step)
        chunks = zip(hidden.split(step), targets.split(step), warm, strict=False)
        # With gradients, the head trains or is no plain layer: the backward computes chunks again.
        how: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([cast(Tensor, checkpoint(logprobs, *chunk, **how)) for chunk in chunks])

    def likeliest(self, batch: MicroBatch, count: int) -> tuple[Tensor, Tensor]:
        """Compute [N, count] ids of the likeliest tokens in the place of each trained one, and
        their log-probs at temperature 1; best first."""
        if self.why_all_logits is not None:
            parts = [self._all_logits(batch)]
        else:
            head, step = self._head()
            parts = (head(part) for part in self.hidden(batch).split(step))  # one at a time
        found = [part.float().log_softmax(-1).topk(count) for part in parts]
        return torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])

    def _head(self) -> tuple[OutputHead, int]:
        """Return the head, and how many positions may meet the vocabulary at once."""
        head = OutputHead(self.model)
        return head, max(1, self.max_logits // head.embedding.weight.shape[0])

    def _all_logits(self, batch: MicroBatch) -> Tensor:
        logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
        return logits.flatten(0, 1)[batch.places]


def pick(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Compute the float32 log-prob [n] of each target under logits [n, vocabulary]."""
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return -F.cross_entropy(logits, targets, reduction="none")


def scatter(batch: MicroBatch, values: Tensor, result: list[list[float]]) -> None:
    """Write [N] values of the batch's trained tokens to their places in ``result``."""
    where = zip(batch.rows.tolist(), batch.columns.tolist(), values.tolist(), strict=True)
    for row, column, value in where:
        result[batch.indices[row]][column + 1] = value


def gather(batch: MicroBatch, columns: Mapping[int, Sequence[float]]) -> Tensor:
    """Collect [N] values of the batch's trained tokens; ``columns``: by the index of the row."""
    where = zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
    values = [columns[batch.indices[row]][column + 1] for row, column in where]
    return torch.tensor(values, dtype=torch.float32, device=batch.targets.device)


def columns_of(
    rows: Sequence[TrainingRow], batch: MicroBatch, names: Iterable[str]
) -> dict[str, Tensor]:
    """Collect {name: [N]} of those ``names`` that the batch's rows have."""
    found: dict[str, Tensor] = {}
    for name in names:
        having = [index for index in batch.indices if name in rows[index].extra]
        if having and len(having) < len(batch.indices):
            raise ValueError(f"some rows have {name!r} and some have not: give it to all or none")
        if having:
            found[name] = gather(batch, {index: rows[index].extra[name] for index in having})
    return found


# ---- the output embedding


class OutputHead:
    """Hidden states [n, hidden] to logits [n, vocabulary]: the output embedding, and what some
    families do to logits after it."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.embedding: Any = model.get_output_embeddings()
        self._cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self._factor = factor / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.embedding(hidden)
        if self._factor != 1.0:
            logits = logits * self._factor
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    @property
    def is_frozen_linear(self) -> bool:
        """Whether ``slopes`` applies."""
        kind = type(self.embedding)
        plain = kind is nn.Linear or kind.__name__ == "FSDPLinear"  # one that is spread over ranks
        return plain and not any(p.requires_grad for p in self.embedding.parameters())

    def slopes(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute [n] log-probs, and the gradient [n, hidden] of each with respect to its own
        hidden state.

        The gradient of a log-softmax, a one-hot vector minus the softmax, is computed in the place
        of the logits: a quarter of autograd's memory.
        """
        logits = self(hidden).float()
        slope_of_cap = None if self._cap is None else 1 - (logits / self._cap).square_()
        if temperatures is not None:
            logits /= temperatures[:, None]
        logits -= logits.amax(-1, keepdim=True)
        picked = logits.gather(1, targets[:, None])[:, 0]
        total = logits.exp_().sum(-1)
        logits *= -1.0 / total[:, None]
        logits.scatter_add_(1, targets[:, None], torch.ones_like(picked)[:, None])
        if temperatures is not None:
            logits /= temperatures[:, None]
        if slope_of_cap is not None:
            logits *= slope_of_cap
        slopes = logits.to(self.embedding.weight.dtype) @ self.embedding.weight
        return picked - total.log(), slopes if self._factor == 1.0 else slopes * self._factor


class FrozenHead(torch.autograd.Function):
    """Compute log-probs through a head without trainable parameters.

    The log-prob of a row depends on no other row. So its gradient with respect to the row's hidden
    state is computed in the forward, while the logits exist, and the backward only scales it:
    logits are neither kept nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputHead,
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
            logprobs[part], slopes[part] = head.slopes(hidden[part], targets[part], warm)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return None, (slopes * grads[0][:, None]).to(slopes.dtype), None, None, None
