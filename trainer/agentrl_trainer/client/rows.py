"""Convert the clients' datums (inputs, and targets shifted by one) to the learner's training rows.

With T targets a row has T + 1 tokens: position i of the targets is position i + 1 of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl_trainer.client.types import Data, Datum, numbers, token_ids
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.step_stats import StepStats

_EXTRA = {"proximal": "proximal", "reference": "reference", "length_weights": "weights"}
_INPUTS = {"target_tokens", "weights", "logprobs", "advantages", "mask", *_EXTRA}


def to_rows(
    data: Data, adapter: str, loss_fn: str | None, vocabulary: int, context: int
) -> list[TrainingRow]:
    """Return the learner's rows. Training rows among ``data`` pass unchanged.

    ``loss_fn`` None prepares rows for their log-probs alone.

    Raises:
        ValueError: names the datum, the field and the fix.
    """
    if not data:
        raise ValueError("data is empty: give at least one Datum")
    rows: list[TrainingRow] = []
    for index, datum in enumerate(data):
        if isinstance(datum, TrainingRow):
            rows.append(datum if datum.adapter == adapter else replace(datum, adapter=adapter))
            continue
        try:
            row = to_row(datum, adapter, loss_fn)
            if (largest := max(row.tokens)) >= vocabulary:
                raise ValueError(f"token id {largest} is beyond the vocabulary of {vocabulary}")
            if (length := len(row.tokens)) > context:
                raise ValueError(
                    f"the row has {length} tokens and the model's context is {context}: cut it"
                )
        except ValueError as error:
            raise ValueError(f"data[{index}]: {error}") from error
        rows.append(row)
    return rows


def to_row(datum: Datum, adapter: str, loss_fn: str | None) -> TrainingRow:
    """Return one datum as a training row; ``loss_fn`` as in ``to_rows``."""
    inputs = datum.loss_fn_inputs
    if unknown := set(inputs) - _INPUTS:
        raise ValueError(f"loss_fn_inputs has {sorted(unknown)}, but known are {sorted(_INPUTS)}")
    if "target_tokens" not in inputs:
        raise ValueError("loss_fn_inputs lacks target_tokens: of a row x they are x[1:]")
    read = datum.model_input.to_ints()
    targets = token_ids(inputs["target_tokens"], "target_tokens")
    if not targets or len(read) != len(targets):
        raise ValueError(
            f"model_input has {len(read)} tokens and target_tokens {len(targets)}: of a row x give "
            "x[:-1] and x[1:], one token each at least"
        )
    columns = {name: numbers(inputs[name], name) for name in inputs if name != "target_tokens"}
    for name, values in columns.items():
        if len(values) != len(targets):
            raise ValueError(
                f"{name} has {len(values)} values, target_tokens {len(targets)}: one for each"
            )
    nothing = [0.0] * len(targets)
    if loss_fn in (None, "cross_entropy"):
        if "weights" in columns and "advantages" in columns and loss_fn is not None:
            raise ValueError("cross_entropy takes weights, not advantages: leave one of them out")
        credit = columns.get("weights", [1.0] * len(targets))
        sampled = columns.get("logprobs", nothing)
        counts = [True] * len(targets)
    else:
        if missing := {"logprobs", "advantages"} - columns.keys():
            raise ValueError(f"loss_fn_inputs lacks {sorted(missing)}, which {loss_fn} needs")
        if "weights" in columns:
            raise ValueError(
                f"weights are cross_entropy's; {loss_fn} takes advantages, and length_weights to "
                "weigh each token's term"
            )
        credit, sampled = columns["advantages"], columns["logprobs"]
        counts = [a != 0 or q != 0 for a, q in zip(credit, sampled, strict=True)]
    if "mask" in columns:
        counts = [value != 0 for value in columns["mask"]]
    if above := [q for q, on in zip(sampled, counts, strict=True) if on and q > 0]:
        raise ValueError(f"logprobs holds {above[0]}: a log-probability is never positive")
    # A target that is not the next input cannot be learned from; without weight it is padding.
    for at, (target, following) in enumerate(zip(targets, read[1:], strict=False)):
        if target == following or not counts[at]:
            continue
        if credit[at] != 0:
            raise ValueError(
                f"target_tokens[{at}] is {target}, but model_input[{at + 1}] is {following}: "
                "targets are the inputs shifted by one"
            )
        counts[at] = False
    taken = ["length_weights"] if loss_fn is None else [*_EXTRA]
    return TrainingRow(
        tokens=[*read, targets[-1]],
        mask=[False, *counts],
        logprobs=[0.0, *sampled],
        advantages=[0.0, *credit],
        adapter=adapter,
        extra={_EXTRA[name]: [0.0, *columns[name]] for name in taken if name in columns},
    )


def outputs(logprobs: Sequence[Sequence[float]]) -> list[dict[str, NDArray[np.float32]]]:
    """Return rows of log-probs as ``loss_fn_outputs``."""
    return [{"logprobs": np.asarray(row[1:], dtype=np.float32)} for row in logprobs]


def metrics_of(stats: StepStats, loss_fn: str) -> dict[str, float]:
    """Return the metrics of a step, each named with its reduction as in Tinker."""
    found = {"loss:sum": stats.loss, "tokens:sum": float(stats.tokens)}
    if loss_fn == "cross_entropy":  # has no sampler's log-probs to compare with
        return found
    found |= {
        "entropy:mean": stats.entropy,
        "ratio:mean": stats.ratio_mean,
        "ratio:max": stats.ratio_max,
        "clip_fraction:mean": stats.clip_fraction,
        "sampler_trainer_kl:mean": stats.sampler_trainer_kl,
        "logprob_difference:max": stats.max_logprob_difference,
    }
    return found | {f"{name}:mean": value for name, value in stats.metrics.items()}
