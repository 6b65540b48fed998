"""Compute log-probs of chosen tokens under a causal language model, in float32.

Knows transformers models and micro-batches, nothing of adapters or losses. Two things make it
quick, and neither changes the result: the decoder runs over token tries (``prefix_attention``), and
the vocabulary is met by a chunk of positions at a time (``output_head``). ``model_support`` finds
out whether a model allows both.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl_trainer.data.packing import MicroBatch
from agentrl_trainer.learner.model_support import (
    decoder_states,
    why_no_flex,
    why_no_tries,
    why_not_by_parts,
    why_not_causal,
)
from agentrl_trainer.learner.output_head import FrozenHead, OutputHead, pick
from agentrl_trainer.models.loading import ModelError

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
        self.why_all_logits = why_not_by_parts(model)
        self.why_padded = self.why_all_logits or why_no_tries(model)
        self.why_no_flex = self.why_padded or why_no_flex(model)

    def __call__(self, batch: MicroBatch) -> Tensor:
        if self.why_all_logits is not None:
            return pick(self._all_logits(batch), batch.targets, batch.temperatures)
        return self.of_hidden(self.hidden(batch), batch.targets, batch.temperatures)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Compute [N, hidden], the decoder's output from which each trained token is predicted."""
        trie = batch.trie and replace(batch.trie, flex=not self.why_no_flex)
        return decoder_states(self.model, batch.input_ids, trie)[batch.places]

    def of_hidden(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """Compute [N] the targets' log-probs, never holding more than ``max_logits`` logits."""
        head, step = self._head()
        if torch.is_grad_enabled() and head.is_frozen_linear:
            return cast(Tensor, FrozenHead.apply(head, hidden, targets, temperatures, step))
        warm = repeat(None) if temperatures is None else temperatures.split(step)
        chunks = zip(hidden.split(step), targets.split(step), warm, strict=False)
        if not torch.is_grad_enabled():
            return torch.cat([head.logprobs(*chunk) for chunk in chunks])
        # The head trains, or is no plain layer: its chunks are computed again in the backward.
        found = [checkpoint(head.logprobs, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(cast(list[Tensor], found))

    def _head(self) -> tuple[OutputHead, int]:
        """Return the head, and how many positions may meet the vocabulary at once."""
        head = OutputHead(self.model)
        return head, max(1, self.max_logits // head.embedding.weight.shape[0])

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

    def _all_logits(self, batch: MicroBatch) -> Tensor:
        logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
        return logits.flatten(0, 1)[batch.places]
