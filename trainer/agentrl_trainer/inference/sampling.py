"""From logits to tokens: one uniform number per token, inverted through the filtered distribution.

Knows logits and sampling parameters, not requests, caches, models or grammars.

One uniform per token makes a seeded sequence independent of its neighbors (each sequence owns its
generator and consumes exactly one number a step), and costs O(vocab) vector work only. Grammar
masks and logit biases steer single rows and cost the other rows nothing; log-probabilities stay
those of the raw logits, so a forced token's may be very low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from agentrl_trainer.inference.requests import SampleParams

_BLOCK = 64
_SEARCHED_WHOLE, _BLOCK_SIZE = 8192, 128
"""Sizes of a vocabulary that is searched in one step, and of the blocks of a larger one."""


def uniforms(*key: int) -> Iterator[float]:
    """Yield the numbers in [0, 1) of one sequence: a function of the key and the step only."""
    entropy = [part & 0xFFFFFFFFFFFFFFFF for part in key]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
    while True:  # a call of numpy costs as much as a whole block of numbers
        yield from generator.random(_BLOCK).tolist()


@dataclass(slots=True)
class Steering:
    """What moves some rows away from their raw logits."""

    rows: list[int]
    """These rows, ascending; the fields below have an entry for each of them."""
    biases: list[tuple[torch.Tensor, torch.Tensor] | None]
    """Token ids and the numbers added to their logits."""
    allowed: torch.Tensor | None
    """``[rows, vocab]`` masks; None: everything is allowed. Of a row that may pick no token, the
    picked one means nothing."""


@dataclass(slots=True)
class Picked:
    """One entry per row."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    log_masses: dict[int, float]
    """Row that may be masked to the log of the raw probability that its mask left."""


def pick(
    logits: torch.Tensor,
    params: Sequence[SampleParams],
    numbers: Sequence[float],
    steering: Steering | None = None,
) -> Picked:
    """Sample one token per row of ``logits`` ``[rows, vocab]``, with a uniform number for each row.

    Log-probabilities are of the raw logits in float32, before steering, temperature and filters.
    """
    logits = logits.float()
    exact = torch.device("cpu") if logits.device.type == "mps" else logits.device
    u = torch.tensor(numbers, dtype=torch.float64, device=exact)  # MPS has no float64
    probs = torch.softmax(logits, dim=-1)
    # Log-probabilities as log_softmax gives them, but without its pass over the vocabulary.
    most = logits.amax(dim=-1, keepdim=True)
    log_of_most = probs.amax(dim=-1, keepdim=True).log_()
    if steering is None or len(steering.rows) < len(params):
        ids = _sampled(logits, probs, params, u)
    else:
        ids = torch.empty(len(params), dtype=torch.long, device=logits.device)
    log_masses: dict[int, float] = {}
    if steering is not None:  # sample these rows again; the others are not even copied
        rows = torch.tensor(steering.rows, device=logits.device)
        raw = logits[rows]
        steered = raw.clone()
        for row, bias in enumerate(steering.biases):
            if bias is not None:
                steered[row, bias[0]] += bias[1]
        if (allowed := steering.allowed) is not None:
            steered.masked_fill_(~allowed, float("-inf"))
            left = (raw - most[rows]) + log_of_most[rows]
            left = left.masked_fill_(~allowed, float("-inf")).logsumexp(dim=-1)
            # Rounding may leave slightly more than everything.
            log_masses = dict(zip(steering.rows, left.clamp_(max=0.0).tolist(), strict=True))
        weights = torch.softmax(steered, dim=-1)
        ids[rows] = _sampled(steered, weights, [params[i] for i in steering.rows], u[steering.rows])
    chosen = ((logits.gather(1, ids[:, None]) - most) + log_of_most)[:, 0]
    tops: list[list[tuple[int, float]]] = [[] for _ in params]
    if deepest := max(p.top_logprobs for p in params):
        top_logits, top_ids = logits.topk(min(deepest, logits.shape[1]), dim=-1)
        values, indices = ((top_logits - most) + log_of_most).tolist(), top_ids.tolist()
        for row, p in enumerate(params):
            k = p.top_logprobs
            tops[row] = list(zip(indices[row][:k], values[row][:k], strict=True))
    return Picked(ids.tolist(), chosen.tolist(), tops, log_masses)


def _sampled(
    logits: torch.Tensor, probs: torch.Tensor, params: Sequence[SampleParams], u: torch.Tensor
) -> torch.Tensor:
    """``probs``: the softmax of ``logits``. ``u``: one uniform number per row, where to compute."""
    greedy = [i for i, p in enumerate(params) if p.greedy]
    if len(greedy) == len(params):
        return logits.argmax(dim=-1)
    device = logits.device
    logits, probs = logits.to(u.device), probs.to(u.device)
    if any(p.temperature != 1 for p in params):
        temperature = logits.new_tensor([1.0 if p.greedy else p.temperature for p in params])
        probs = torch.softmax(logits / temperature[:, None], dim=-1)
    filtered = [i for i, p in enumerate(params) if not p.greedy and (p.top_k or p.top_p < 1)]
    if len(filtered) < len(params):
        ids = _invert(probs, u)
    else:
        ids = torch.empty(len(params), dtype=torch.long, device=logits.device)
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        ids[rows] = _filtered_pick(probs[rows], u[rows], [params[i] for i in filtered])
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        ids[rows] = logits[rows].argmax(dim=-1)
    return ids.to(device)


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative probability exceeds ``u`` times the total; ``[rows]``.

    Inversion: Devroye 1986, "Non-Uniform Random Variate Generation", section III.2. In float64,
    because with 150,000 tokens a float32 running sum would lose the tail. A token of probability 0
    never moves the sum, so it is never the first to exceed anything.

    A large vocabulary is searched in two steps, by sums of blocks and within the block that is hit:
    a running sum over all of it takes eight times as long.
    """
    if probs.shape[1] <= _SEARCHED_WHOLE:
        return _search(probs, u)[0][:, 0]
    blocks = F.pad(probs, (0, -probs.shape[1] % _BLOCK_SIZE)).view(len(probs), -1, _BLOCK_SIZE)
    sums = blocks.sum(-1)
    block, left = _search(sums, u)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK_SIZE))[:, 0]
    share = (1 - left / sums.gather(1, block)).clamp(min=0)
    return (block * _BLOCK_SIZE + _search(inside, share[:, 0])[0])[:, 0]


def _search(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the found index, and what its running sum exceeds the goal by; each ``[rows, 1]``."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    goal = (u[:, None] * total).minimum(total.nextafter(torch.zeros_like(total)))
    # Beyond the end only where a weight is NaN.
    found = torch.searchsorted(sums, goal, right=True).clamp_(max=weights.shape[1] - 1)
    return found, sums.gather(1, found) - goal


def _filtered_pick(
    probs: torch.Tensor, u: torch.Tensor, params: Sequence[SampleParams]
) -> torch.Tensor:
    """Top-k (arXiv:1805.04833), then top-p (arXiv:1904.09751, section 3.1) of the renormalized
    rest."""
    vocab = probs.shape[1]
    # Stable, so that equally likely tokens are kept in the same order on every machine.
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)
    top_k = torch.tensor([p.top_k or vocab for p in params], device=probs.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], 0.0)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probs.device)
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    # Keep a token if the tokens before it do not reach top_p yet: the first is always kept.
    before = cumulative - ordered
    cut = (before >= top_p[:, None] * cumulative[:, -1:]) & (top_p < 1)[:, None]
    cut[:, 0] = False
    return order.gather(1, _invert(ordered.masked_fill(cut, 0.0), u)[:, None])[:, 0]
