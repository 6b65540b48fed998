"""Training rows as verl's batches, and the trainer's losses as verl's loss functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]

from agentrl_trainer.data.training_row import LOSS_EXTRA, TrainingRow
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import LOSSES
from agentrl_trainer.learner.prepare_batch import RefusedRows

_SUM = "sum/"
"""Prefix of what a loss sums, among verl's metrics."""


def shares(rows: Sequence[TrainingRow], parts: int) -> list[int | None]:
    """Order rows so that verl's split into ``parts`` of equal length gives each of them about as
    many tokens.

    Returns:
        Indices of rows. None stands for a row that trains nothing.
    """
    by_length = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
    filled: list[int | None] = [*by_length, *[None] * (-len(rows) % parts)]
    return [index for part in range(parts) for index in filled[part::parts]]


def to_batch(
    rows: Sequence[TrainingRow],
    order: Sequence[int | None],
    temperature: float,
    token_budget: int,
    sequence_parts: int,
) -> TensorDict:
    """Make verl's batch: columns [rows, jagged], aligned with the tokens of each row.

    Args:
        temperature: of all rows.
        token_budget: of a micro-batch, on each of ``sequence_parts`` workers that share a row.

    Raises:
        ValueError: some rows have a column that others lack.
    """
    blank = TrainingRow([0, 0], [False] * 2, [0.0] * 2, [0.0] * 2)
    given = [blank if index is None else rows[index] for index in order]
    columns: dict[str, Iterable[Sequence[float]]] = {
        "loss_mask": [list(map(int, row.mask)) for row in given],
        "sampling": [row.logprobs for row in given],
        "advantages": [row.advantages for row in given],
    }
    for name in sorted(LOSS_EXTRA.intersection(*(row.extra for row in rows))):
        columns[name] = [row.extra.get(name, [0.0] * 2) for row in given]
    if mixed := LOSS_EXTRA.intersection(chain(*(row.extra for row in rows))) - columns.keys():
        raise ValueError(f"some rows have {min(mixed)!r} and some have not: give it to all or none")
    lengths = [len(row.tokens) for row in given]
    tensors = {name: _jagged(values, torch.float32) for name, values in columns.items()}
    tensors["loss_mask"] = tensors["loss_mask"].to(torch.int64)
    tensors["input_ids"] = _jagged([row.tokens for row in given], torch.int64)
    tensors["position_ids"] = _jagged([range(length) for length in lengths], torch.int64)
    options = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": max(token_budget, -(-max(lengths) // sequence_parts)),
        "pad_mode": "no_padding",
        "temperature": temperature,
    }
    return tensordict_utils.get_tensordict(tensors, options)


def _jagged(rows: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    each = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(each, layout=torch.jagged)


def temperatures_of(rows: Sequence[TrainingRow]) -> list[float]:
    """Return the temperature of each row.

    Raises:
        RefusedRows: the tokens of a row were sampled at different ones.
    """
    each: list[float] = []
    for row in rows:
        column = row.extra.get("temperature", [1.0] * len(row.tokens))
        found = {value for value, on in zip(column, row.mask, strict=True) if on} or {1.0}
        if len(found) > 1:
            raise RefusedRows(
                f"verl computes a row at one temperature, and one has {sorted(found)}: cut "
                "trajectories by rules.one_temperature"
            )
        each.append(found.pop())
    return each


def logprobs_of(
    rows: Sequence[TrainingRow], order: Sequence[int | None], found: TensorDict
) -> list[list[float]]:
    """Return the log-prob of each trained token, aligned with ``tokens``; 0 elsewhere."""
    result = [[0.0] * len(row.tokens) for row in rows]
    for index, own in zip(order, found["log_probs"].unbind(), strict=True):
        if index is not None:  # verl's stand at the token before
            before = [0.0, *own.tolist()]
            masked = zip(rows[index].mask, before, strict=False)
            result[index] = [value if on else 0.0 for on, value in masked]
    return result


@dataclass(frozen=True, slots=True)
class VerlLoss:
    """A loss of ``LOSSES``, as verl calls it for each micro-batch."""

    name: str
    config: LossConfig
    normalize_by: float

    def check(self, columns: Collection[str]) -> None:
        """Raise here what the loss would raise in a worker: rows lack one of its columns.

        Raises:
            ValueError: names the column.
        """
        one = torch.zeros(1, requires_grad=True)
        given = dict.fromkeys(LOSS_EXTRA.intersection(columns), one.detach())
        sequences = torch.zeros(1, dtype=torch.int64)
        loss, rest = LOSSES[self.name], one.detach()
        loss(one, rest, rest, self.config, sequences=sequences, **given)

    def __call__(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, float]]:
        mask = _of_targets(data["loss_mask"]).bool()

        def trained(name: str) -> Tensor:
            return _of_targets(data[name])[mask]

        offsets = data["input_ids"].offsets()
        places = torch.arange(len(offsets) - 1, device=offsets.device)
        sequences = torch.repeat_interleave(places, offsets.diff())[mask]
        value, sums = LOSSES[self.name](
            model_output["log_probs"].values()[mask], trained("sampling"), trained("advantages"),
            self.config, sequences=sequences,
            **{name: trained(name) for name in LOSS_EXTRA if name in data.keys()},  # noqa: SIM118 - not a mapping
        )  # fmt: skip
        # verl takes the mean over its workers where the sum over all tokens is meant.
        scaled = value * (data["dp_size"] / self.normalize_by)
        return scaled, {_SUM + name: float(total) for name, total in sums.items()}


def _of_targets(column: Tensor) -> Tensor:
    """Move each entry to the token before, where verl has a target's log-prob. What comes from the
    next row is of its first token, which never trains."""
    return torch.roll(column.values(), -1, 0)


def sums_of(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add up what a loss summed in each micro-batch of each worker."""
    found: dict[str, Tensor] = {}
    for name in (name for name in metrics if name.startswith(_SUM)):
        values = torch.tensor(list(_flat(metrics[name])))
        found[name.removeprefix(_SUM)] = values.amax() if name.endswith("_max") else values.sum()
    return found


def _flat(values: Any) -> Iterable[float]:
    if isinstance(values, (int, float)):
        return [values]
    return chain.from_iterable(map(_flat, values))
