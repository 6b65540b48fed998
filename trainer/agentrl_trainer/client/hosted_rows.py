"""The trainer's own rows over Tinker's API, which knows no masks, no weights and no means.

Pure: rows, and the log-probs that the service computed of them, in; datums and statistics out.

The losses of ``NATIVE`` are linear in the advantages, so whatever multiplies a token's term there,
its weight and one over the number of the step's tokens, goes into its advantage; and a target
without an advantage has neither value nor gradient, so no mask is needed. Every other loss, and
what goes around losses (the KL to a reference, corrections), is our own formula on the service's
log-probs, by ``forward_backward_custom``: right in the same way, for the price of another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl_trainer.client.backend import RefusedRows
from agentrl_trainer.client.types import Array, Datum, ModelInput
from agentrl_trainer.data.packing import count_rows
from agentrl_trainer.data.training_row import LOSS_EXTRA, TrainingRow, with_extra
from agentrl_trainer.learner.loss_options import LossConfig, parse_loss_options
from agentrl_trainer.learner.losses import LOSSES, Sums
from agentrl_trainer.learner.step_stats import StepStats, step_stats

_Logprobs = Callable[[Sequence[TrainingRow]], Sequence[Sequence[float]]]

NATIVE: dict[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
}
"""Tinker's losses that are linear in the advantages, and their options there. Its ``dro`` is not:
its square would hold even those tokens that nobody sampled near probability one."""


def native_config(
    loss: str, config: LossConfig, rows: Sequence[TrainingRow] = ()
) -> dict[str, float] | None:
    """What to call Tinker's own loss with; None: it has no such loss, or not all of it. Its ratios
    are against the sampler, so not of ``rows`` with the log-probs of a proximal policy."""
    if loss not in NATIVE or any("proximal" in row.extra for row in rows):
        return None
    options = parse_loss_options(loss, config)
    corrects = options.correction.correction != "none"
    if options.kl.kl_coef or corrects or getattr(options.own, "dual_clip_threshold", 0.0):
        return None
    return {name: float(getattr(options.own, name)) for name in NATIVE[loss]}


def folded(row: TrainingRow, divisor: float) -> Datum:
    """A row for a native loss: its weights, and one over ``divisor``, are in the advantages."""
    weights = row.extra.get("weights", [1.0] * len(row.tokens))
    columns: dict[str, Array] = {
        "logprobs": [q if on else 0.0 for q, on in zip(row.logprobs, row.mask, strict=True)][1:],
        "advantages": [
            a * w / divisor if on else 0.0
            for a, w, on in zip(row.advantages, weights, row.mask, strict=True)
        ][1:],
    }
    return _datum(row, columns)


def bare(row: TrainingRow) -> Datum:
    """Only its tokens: for log-probs, and for a loss of ours. Tinker's cross_entropy wants weights,
    even where only its log-probs are."""
    return _datum(row, {"weights": [0.0] * (len(row.tokens) - 1)})


def _datum(row: TrainingRow, columns: dict[str, Array]) -> Datum:
    inputs = {"target_tokens": row.tokens[1:], **columns}
    return Datum(ModelInput.from_ints(row.tokens[:-1]), inputs)


def loss_of(
    rows: Sequence[TrainingRow], logprobs: Sequence[Tensor], loss: str, config: LossConfig
) -> tuple[Tensor, Sums]:
    """The loss's sum over the rows' tokens, and what is reported of them.

    Args:
        logprobs: of each row's targets, [tokens of the row - 1].
    """
    masks = [torch.tensor(row.mask[1:]) for row in rows]

    def flat(columns: Sequence[Sequence[float]]) -> Tensor:
        kept = [
            torch.tensor(column[1:], dtype=torch.float32)[mask]
            for column, mask in zip(columns, masks, strict=True)
        ]
        return torch.cat(kept)

    of_tokens = torch.cat([row[mask] for row, mask in zip(logprobs, masks, strict=True)])
    counts = torch.tensor([int(mask.sum()) for mask in masks])
    return LOSSES[loss](
        of_tokens,
        flat([row.logprobs for row in rows]),
        flat([row.advantages for row in rows]),
        torch.ones_like(of_tokens, dtype=torch.bool),
        config,
        sequences=torch.repeat_interleave(torch.arange(len(rows)), counts),
        **{
            name: flat([row.extra[name] for row in rows])
            for name in LOSS_EXTRA
            if any(name in row.extra for row in rows)
        },
    )


def stats_of(
    rows: Sequence[TrainingRow], loss: Tensor, sums: Sums, divisor: float, started: float
) -> StepStats:
    """What ``Learner.forward_backward`` would say of the same rows. What the service shares among
    them is not known: every row counts by itself."""
    return step_stats(loss.item() / divisor, sums, count_rows(rows), started)


def trained_logprobs(
    rows: Sequence[TrainingRow], computed: Iterable[NDArray[np.float32]]
) -> list[dict[str, NDArray[np.float32]]]:
    """``loss_fn_outputs`` as the local backend has them: 0 where nothing trains.

    Args:
        computed: of those rows that train, each target's log-prob.
    """
    found = iter(computed)
    outputs: list[dict[str, NDArray[np.float32]]] = []
    for row in rows:
        mask = np.asarray(row.mask[1:], dtype=bool)
        values = next(found) if row.trained else np.zeros(len(mask), dtype=np.float32)
        outputs.append({"logprobs": np.where(mask, values, np.float32(0))})
    return outputs


def check_rows(rows: Sequence[TrainingRow]) -> None:
    """Raises RefusedRows for what Tinker has no way to learn from; ValueError for a column that
    some rows have and some have not."""
    for name, why in _IMPOSSIBLE.items():
        if any(name in row.extra for row in rows):
            raise RefusedRows(why)
    for name in LOSS_EXTRA:
        if len({name in row.extra for row in rows if row.trained}) > 1:
            raise ValueError(f"some rows have {name!r} and some have not: give it to all or none")


_IMPOSSIBLE = {
    "temperature": "temperature: these answers were sampled at another than 1, and Tinker computes "
    'log-probs at temperature 1 only. Let the agent set none, or train with backend = "local"',
    "returns": "estimator: Tinker has no value function; choose another than gae",
}


class HostedPolicy:
    """What ``update.prepare`` asks of a policy, by the service's log-probs.

    ``forward`` and ``reference`` give [tokens of the row - 1] log-probs of each row's targets.
    """

    def __init__(self, forward: _Logprobs, reference: _Logprobs) -> None:
        self._forward = forward
        self._reference = reference

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        check_rows(rows)
        return list(rows)

    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        raise ValueError(_IMPOSSIBLE["returns"])

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        if adapter is not None:
            raise ValueError("kl_reference: over Tinker the reference is the base model")
        return with_extra(rows, reference=_aligned(rows, self._reference(rows)))

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        return with_extra(rows, proximal=_aligned(rows, self._forward(rows)))


def _aligned(rows: Sequence[TrainingRow], logprobs: Sequence[Sequence[float]]) -> list[list[float]]:
    """As the learner has them: one for each token of a row, 0 where nothing trains."""
    return [
        [0.0, *(lp if on else 0.0 for lp, on in zip(found, row.mask[1:], strict=True))]
        for row, found in zip(rows, logprobs, strict=True)
    ]
