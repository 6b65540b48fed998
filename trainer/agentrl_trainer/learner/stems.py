"""Compute stems, the long prefixes that micro-batches share, once for all of them.

Knows token tries and autograd, nothing of adapters, losses or optimizers. A stem's keys and values
are computed before its first micro-batch. Each micro-batch adds the gradients of these to one sum,
and behind the last one the sum goes backward through the stem. This is exact: a stem holds no token
that trains, so nothing else depends on it.

As many tokens of a stem as the budget allows beside a micro-batch keep their activations meanwhile.
The others are computed in segments whose activations are dropped, and a second time, last segment
first, for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl_trainer.data.packing import MicroBatch, Stem
from agentrl_trainer.models.prefix_attention import KeysValues, Trie, pack_trie


class OpenStems:
    """Keys and values of the stems that the current micro-batch continues, and their gradients.

    Args:
        compute: runs the decoder over tokens [1, U] of a trie.
        activate: makes the model compute with an adapter.
        keep: tokens whose activations may be held, those of a micro-batch among them.
        segment: tokens of a stem that are computed at once where activations are dropped.
        backward: whether gradients are asked for.
    """

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        compute: Callable[[Tensor, Trie], Tensor],
        activate: Callable[[str], None],
        device: torch.device,
        *,
        keep: int,
        segment: int,
        backward: bool,
    ) -> None:
        self.batches = batches
        self.recomputed = 0
        """Tokens that were computed a second time for the backward."""
        self._longest = max((batch.stem.end for batch in batches if batch.stem), default=0)
        keep -= max((batch.input_ids.numel() for batch in batches), default=0)
        self._compute, self._activate, self._device = compute, activate, device
        self._keep, self._segment, self.backward = max(keep, 0), segment, backward
        self._open: list[Stem] = []
        self._graphs: dict[Stem, tuple[int, KeysValues]] = {}
        """Of the open stems: how many of the first tokens keep their activations."""
        self._held: KeysValues = {}  # of all open stems, with room for the longest path
        self._grads: KeysValues = {}

    def before(self, stem: Stem | None) -> KeysValues | None:
        """Return the keys and values that a micro-batch of this stem continues.

        Closes the stems that it does not continue; None at the end closes all.
        """
        path = [] if stem is None else stem.path()
        while self._open and self._open != path[: len(self._open)]:
            self._close(self._open.pop())
        for one in path[len(self._open) :]:
            self._activate(one.adapter)
            self._fill(one)
            self._open.append(one)
        return self._leaves(0 if stem is None else stem.end)

    def _fill(self, stem: Stem) -> None:
        size, kept = len(stem.tokens), 0
        if self.backward:
            kept = min(size, self._keep - sum(count for count, _ in self._graphs.values()))
            self._graphs[stem] = kept, self._states(stem, 0, kept) if kept else {}
            self._hold(stem, 0, self._graphs[stem][1])
        with torch.no_grad():
            for first in range(kept, size, self._segment):
                self._hold(stem, first, self._states(stem, first, first + self._segment))

    def _close(self, stem: Stem) -> None:
        """Let the summed gradients go backward through a stem."""
        if not self.backward:
            return
        self._activate(stem.adapter)
        kept, graph = self._graphs.pop(stem)
        for first in reversed(range(kept, len(stem.tokens), self._segment)):
            with torch.enable_grad():
                made = self._states(stem, first, first + self._segment)
            self._go_back(stem, first, made)
        self.recomputed += len(stem.tokens) - kept
        self._go_back(stem, 0, graph)

    def _go_back(self, stem: Stem, first: int, made: KeysValues) -> None:
        start = stem.end - len(stem.tokens) + first
        ends: list[tuple[Tensor, Tensor]] = []
        for module, pair in made.items():
            for tensor, grads in zip(pair, self._grads[module], strict=True):
                own = grads[:, :, start : start + tensor.shape[2]]
                if tensor.requires_grad:  # not below the first layer that the adapter changes
                    ends.append((tensor, own.clone()))
                own.zero_()
        if ends:
            tensors, slopes = zip(*ends, strict=True)
            torch.autograd.backward(tensors, slopes)

    def _states(self, stem: Stem, first: int, last: int) -> KeysValues:
        """Compute the keys and values of some tokens of a stem behind what is held."""
        start = stem.end - len(stem.tokens) + first
        tokens, _, trie = pack_trie([stem.tokens[first:last]], start)
        made: KeysValues = {}
        trie = replace(trie.to(self._device), stem=self._leaves(start), made=made)
        self._compute(torch.tensor([tokens], device=self._device), trie)
        return made

    def _hold(self, stem: Stem, first: int, made: KeysValues) -> None:
        start = stem.end - len(stem.tokens) + first
        for module, pair in made.items():
            if module not in self._held:
                self._held[module] = tuple(self._room(x) for x in pair)
                if self.backward:
                    self._grads[module] = tuple(torch.zeros_like(x) for x in self._held[module])
            for held, tensor in zip(self._held[module], pair, strict=True):
                held[:, :, start : start + tensor.shape[2]] = tensor.detach()

    def _room(self, like: Tensor) -> Tensor:
        # Tokens outermost: the first of them are dense, which autograd wants of a gradient.
        batch, heads, _, dim = like.shape
        return like.new_empty(self._longest, batch, heads, dim).permute(1, 2, 0, 3)

    def _leaves(self, end: int) -> KeysValues | None:
        """Return what is held of the first ``end`` tokens; autograd adds gradients to the sums."""
        if not end:
            return None
        leaves: KeysValues = {}
        for module, pair in self._held.items():
            views = tuple(x.detach()[:, :, :end] for x in pair)
            if self.backward:
                for view, grads in zip(views, self._grads[module], strict=True):
                    view.requires_grad_()
                    view.grad = grads[:, :, :end]
            leaves[module] = views
        return leaves
