"""The trainer's own rows over Tinker's API, which has no masks, no weights and no means.

Pure functions: rows and the log-probs that the service computed for them in, datums and statistics
out.

The losses of ``NATIVE`` are linear in the advantages. So each token's weight, and one over the
number of the step's tokens, are multiplied into its advantage; and a target without an advantage
has neither value nor gradient, so no mask is needed. Every other loss, and what surrounds losses
(the KL to a reference, corrections), is our own formula on the service's log-probs, through
``forward_backward_custom``: the same gradient, for the price of another forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl_trainer.client.types import Array, Datum, ModelInput, RefusedRows
from agentrl_trainer.data.training_row import LOSS_EXTRA, TrainingRow
from agentrl_trainer.learner.loss_options import LossConfig, parse_loss_options
from agentrl_trainer.learner.losses import LOSSES, Sums

NATIVE: dict[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
}
"""Tinker's losses that are linear in the advantages, and the options that they have there. Its
``dro`` is not linear: its square would keep even prompt tokens near probability one."""


def native_config(
    loss: str, config: LossConfig, rows: Sequence[TrainingRow]
) -> dict[str, float] | None:
    """Return the options for Tinker's own loss; None if it cannot compute this one.

    Tinker's ratios are against the sampler, so it cannot use ``rows`` with a proximal policy.
    """
    if loss not in NATIVE or any("proximal" in row.extra for row in rows):
        return None
    options = parse_loss_options(loss, config)
    dual = getattr(options.own, "dual_clip_threshold", 0.0)
    if options.kl.coef or options.correction.mode != "none" or dual:
        return None
    return {name: float(getattr(options.own, name)) for name in NATIVE[loss]}


def folded(row: TrainingRow, divisor: float) -> Datum:
    """Return a row as a datum for a native loss, with advantages times weights over ``divisor``."""
    weights = row.extra.get("weights", [1.0] * len(row.tokens))
    credit = [a * w / divisor for a, w in zip(row.advantages, weights, strict=True)]
    columns = {"logprobs": row.logprobs, "advantages": credit}
    masked = {name: np.where(row.mask, values, 0.0)[1:] for name, values in columns.items()}
    return _datum(row, **masked)


def unweighted(row: TrainingRow) -> Datum:
    """Return a row as a datum for log-probs alone; Tinker's cross_entropy requires weights."""
    return _datum(row, weights=[0.0] * (len(row.tokens) - 1))


def _datum(row: TrainingRow, **columns: Array) -> Datum:
    read = ModelInput.from_ints(row.tokens[:-1])
    return Datum(read, {"target_tokens": row.tokens[1:], **columns})


def loss_of(
    rows: Sequence[TrainingRow], logprobs: Sequence[Tensor], loss: str, config: LossConfig
) -> tuple[Tensor, Sums]:
    """Compute the loss's sum over the rows' trained tokens, and the sums that it reports, from the
    ``logprobs`` of each row's targets, [tokens of the row - 1]."""
    mask = torch.tensor([on for row in rows for on in row.mask[1:]])

    def flat(columns: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for column in columns for value in column[1:]])[mask]

    of_tokens = torch.cat(list(logprobs))[mask]
    counts = torch.tensor([row.trained for row in rows])
    return LOSSES[loss](
        of_tokens,
        flat([row.logprobs for row in rows]),
        flat([row.advantages for row in rows]),
        config,
        sequences=torch.repeat_interleave(torch.arange(len(rows)), counts),
        **{
            name: flat([row.extra[name] for row in rows])
            for name in LOSS_EXTRA
            if any(name in row.extra for row in rows)
        },
    )


def trained_logprobs(
    rows: Sequence[TrainingRow], computed: Iterable[NDArray[np.float32]]
) -> list[dict[str, NDArray[np.float32]]]:
    """Return ``loss_fn_outputs`` as the local backend does, 0 where nothing trains, from the
    targets' log-probs ``computed`` for each row that trains."""
    found = iter(computed)
    return [{"logprobs": _masked(row, next(found) if row.trained else 0.0)} for row in rows]


def aligned(rows: Sequence[TrainingRow], computed: Sequence[Array]) -> list[list[float]]:
    """Return log-probs as the learner does: one for each token of a row, 0 where nothing trains."""
    return [[0.0, *_masked(*one).tolist()] for one in zip(rows, computed, strict=True)]


def _masked(row: TrainingRow, logprobs: Array) -> NDArray[np.float32]:
    return np.where(row.mask[1:], logprobs, 0.0).astype(np.float32)


def check_rows(rows: Sequence[TrainingRow]) -> None:
    """Check that Tinker can learn from the rows.

    Raises:
        RefusedRows: it cannot, for a reason that the message gives.
        ValueError: a column is missing in some of the rows.
    """
    for name, why in IMPOSSIBLE.items():
        if any(name in row.extra for row in rows):
            raise RefusedRows(why)
    for name in LOSS_EXTRA:
        if len({name in row.extra for row in rows if row.trained}) > 1:
            raise ValueError(f"some rows have {name!r} and some have not: give it to all or none")


IMPOSSIBLE = {
    "temperature": "temperature: these answers were sampled at another than 1, and Tinker computes "
    'log-probs at temperature 1 only. Let the agent set none, or train with backend = "local"',
    "returns": "estimator: Tinker has no value function; choose another than gae",
}
"""Why rows with a column cannot be learned from."""
