"""From trajectories to padded micro-batches under a token budget.

Knows token lists and tensors, not models. Rows of like length go together, so little is padding.
Padding is on the right: under causal attention no token ever sees it, hence no attention mask (and
attention kernels are at their fastest without one).

Shapes: B rows, T columns, N trained tokens of the micro-batch (flat, row by row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl_trainer.trajectories import Trajectory

LOSS_EXTRA = frozenset({"weights", "proximal", "reference"})
"""Optional arguments of a loss, see ``losses.Loss``."""
EXTRA = LOSS_EXTRA | {"rewards", "values", "returns"}
"""The last three are what a value function learns from: the reward that a token earned at once, the
value predicted before the update, and the return that the prediction should have been."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One row to learn from. The four lists run parallel; ``mask[0]`` is false, for the first token
    has no log-probability.

    ``logprobs`` (q) and ``advantages`` count only where the mask is on. For ``cross_entropy`` the
    advantages are the weights, and logprobs may be all zeros (the ratio metrics mean nothing then).
    """

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    adapter: str = "default"
    extra: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])
    """More about each token, parallel to the others, read where the mask is on: see ``EXTRA``."""

    def __post_init__(self) -> None:
        if unknown := self.extra.keys() - EXTRA:
            raise ValueError(f"extra holds {sorted(unknown)}, but known are {sorted(EXTRA)}")
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.advantages)}
        lengths |= {len(values) for values in self.extra.values()}
        if len(lengths) > 1:
            raise ValueError(f"a datum's lists must have one length, not {sorted(lengths)}")
        if self.mask and self.mask[0]:
            raise ValueError("the first token of a datum cannot be trained: nothing precedes it")

    @property
    def trained(self) -> int:
        return sum(self.mask)


def to_datum(trajectory: Trajectory, advantage: float | Mapping[str, float]) -> Datum:
    """A trajectory with its credit: one advantage for all its tokens, or one per call id.

    Calls without an entry get 0 but stay in the mask, so they count in the normalisation.
    """
    advantages = [0.0] * len(trajectory.tokens)
    for turn in trajectory.turns:
        value = advantage.get(turn.call_id, 0.0) if isinstance(advantage, Mapping) else advantage
        advantages[turn.start : turn.end] = [value] * (turn.end - turn.start)
    return Datum(
        tokens=trajectory.tokens,
        mask=trajectory.mask,
        logprobs=trajectory.logprobs,
        advantages=advantages,
        adapter=trajectory.adapter,
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one adapter. Row b is ``datums[indices[b]]`` without its last token, which nothing
    follows, and without what comes after its last trained token."""

    adapter: str
    indices: list[int]  # [B] positions in the list that was packed
    lengths: list[int]  # [B] tokens fed per row, padding aside
    input_ids: Tensor  # [B, T] int64
    rows: Tensor  # [N] with ``columns``: the input position whose output predicts the token
    columns: Tensor  # [N]
    targets: Tensor  # [N] the trained tokens
    logprobs: Tensor  # [N] float32, q
    advantages: Tensor  # [N] float32

    def to(self, device: torch.device) -> MicroBatch:
        moved = (
            part.to(device, non_blocking=True)
            for part in (
                self.input_ids,
                self.rows,
                self.columns,
                self.targets,
                self.logprobs,
                self.advantages,
            )
        )
        return MicroBatch(self.adapter, self.indices, self.lengths, *moved)


def _input_length(datum: Datum) -> int:
    """How many tokens must be fed to predict the last trained one; 0 if none is trained."""
    return next((at for at in range(len(datum.mask) - 1, 0, -1) if datum.mask[at]), 0)


def pack(datums: Sequence[Datum], *, token_budget: int, pad_id: int = 0) -> list[MicroBatch]:
    """Micro-batches of at most ``token_budget`` tokens, padding included, or of a single row.

    Deterministic. Rows that train nothing are left out. Longest first, so that running out of
    memory happens at once or not at all.
    """
    lengths = [_input_length(datum) for datum in datums]
    order = sorted(
        (i for i, length in enumerate(lengths) if length),
        key=lambda i: (datums[i].adapter, -lengths[i], i),
    )
    batches: list[MicroBatch] = []
    chunk: list[int] = []
    for i in order:
        starts_anew = chunk and (
            datums[i].adapter != datums[chunk[0]].adapter
            # The first row of a chunk is its longest, so it sets the width.
            or lengths[chunk[0]] * (len(chunk) + 1) > token_budget
        )
        if starts_anew:
            batches.append(_collate(datums, chunk, lengths, pad_id))
            chunk = []
        chunk.append(i)
    if chunk:
        batches.append(_collate(datums, chunk, lengths, pad_id))
    return batches


def _collate(
    datums: Sequence[Datum], chunk: list[int], lengths: Sequence[int], pad_id: int
) -> MicroBatch:
    width = max(lengths[i] for i in chunk)
    padded: list[list[int]] = []
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for row, i in enumerate(chunk):
        datum = datums[i]
        padded.append(datum.tokens[: lengths[i]] + [pad_id] * (width - lengths[i]))
        for at, trained in enumerate(datum.mask):
            if trained:
                rows.append(row)
                columns.append(at - 1)
                targets.append(datum.tokens[at])
                logprobs.append(datum.logprobs[at])
                advantages.append(datum.advantages[at])
    return MicroBatch(
        adapter=datums[chunk[0]].adapter,
        indices=list(chunk),
        lengths=[lengths[i] for i in chunk],
        input_ids=torch.tensor(padded, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        columns=torch.tensor(columns, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
    )
