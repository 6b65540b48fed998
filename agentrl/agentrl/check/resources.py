"""Say whether a training fits into memory, and how long its steps take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.algorithm import update_settings
from agentrl.config.commands import TrainConfig
from agentrl.findings import Finding
from agentrl.training.clients import create_clients
from agentrl_trainer.client import AdamParams
from agentrl_trainer.data.packing import count_tokens, pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import TOKENS_PER_THREAD, default_token_budget

if TYPE_CHECKING:
    from agentrl_trainer.memory import MemoryEstimate

_GB = 1e9
_OF_MEMORY = 0.9
"""What may be filled by an estimate."""
MOST_MEASURED = 4096
"""Tokens of the update that is measured."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of a training's parts on the model's device."""

    parts: dict[str, int]
    device: str
    free: int | None

    @property
    def fits(self) -> bool:
        return self.free is None or sum(self.parts.values()) <= _OF_MEMORY * self.free


def memory_need(
    config: TrainConfig, one: MemoryEstimate, rows: Sequence[TrainingRow], *, rollouts: int,
    device: str, free: int | None, threads: int,
) -> MemoryNeed:  # fmt: skip
    """Add up what trainer and sampler need.

    Args:
        rows: of the trajectories that were sampled in so many rollouts.
        threads: of the trainer, on a CPU.
    """
    adapters, how = len(config.trained), config.rollouts
    longest = max((len(row.tokens) for row in rows), default=1)
    budget = config.learning.micro_batch_tokens or default_token_budget(device)
    if device == "cpu":
        packed = pack(rows, token_budget=budget, enough=TOKENS_PER_THREAD * threads)
        batch = max((some.input_ids.numel() for some in packed), default=1)
    else:
        step = count_tokens(rows).unique * how.batch_size * how.group_size // rollouts
        batch = max(min(budget, step), longest)
    in_flight = min(how.runners * how.concurrency, how.batch_size * how.group_size)
    parts = {
        "weights in the trainer": one.weights,
        "adapter and optimizer": one.adapter * adapters,
        f"activations of a micro-batch of {batch} tokens": one.micro_batch(batch),
    }
    if config.sampler.kind == "embedded":
        parts["weights in the sampler and two adapter versions"] = (
            one.sampler + 2 * one.served_adapter * adapters
        )
        parts[f"KV cache of {in_flight} x {longest} tokens"] = one.kv * in_flight * longest
    return MemoryNeed(parts, device, free)


def memory_findings(need: MemoryNeed, config: TrainConfig) -> list[Finding]:
    """Say what is needed, what is there, and what to lower."""
    total = sum(need.parts.values())
    listed = [Finding(f"{_gb(size)} {name}") for name, size in need.parts.items()]
    there = "" if need.free is None else f" of {_gb(need.free)} free on {need.device}"
    largest = max(need.parts, key=need.parts.__getitem__)
    if need.fits:
        helps = ""
    elif "activations" in largest:
        helps = "lower learning.micro_batch_tokens, or set learning.gradient_checkpointing"
    elif "KV" in largest:
        helps = "lower --runners"
    else:
        helps = "choose a smaller model, model.dtype bfloat16 or model.load_in_4bit"
    fits = "" if need.free is None else (", fits" if need.fits else ", does not fit")
    found = [Finding(f"about {_gb(total)}{there}{fits}", helps), *listed]
    if config.sampler.kind == "vllm":
        found.append(Finding("vLLM's own memory comes on top: see --gpu-memory-utilization"))
    return found


def _gb(size: float) -> str:
    if size < _GB:
        return f"{size / 1e6:.0f} MB" if size > 1e7 else f"{size / 1e6:.1f} MB"
    return f"{size / _GB:.1f} GB" if size < 10 * _GB else f"{size / _GB:.0f} GB"


# ---- time


@dataclass(frozen=True, slots=True)
class UpdateSpeed:
    """A measured update."""

    tokens: int
    """That went through the model."""
    seconds: float
    """Of forward and backward."""
    overhead: float
    """Seconds of the optimizer's step and of saving the adapter."""


def measure_update(
    config: TrainConfig, rows: Sequence[TrainingRow], note: Callable[[str], None]
) -> UpdateSpeed:
    """Make one update of a fresh adapter, which is thrown away, with some of the rows.

    The first forward and backward, of one row, is not measured: it allocates and compiles.

    Args:
        note: receives remarks on how the model is trained.
    """
    some = sorted(rows, key=lambda row: row.tokens)  # those that share a prefix are neighbors
    while len(some) > 1 and count_tokens(some).unique > MOST_MEASURED:
        some = some[: len(some) // 2]
    with tempfile.TemporaryDirectory() as folder:
        backend = create_clients(config, Path(folder), note)
        client, how = next(iter(backend.clients.values())), update_settings(config)
        client.forward_backward(some[:1], "importance_sampling", logprobs=False).result()
        began = time.perf_counter()
        stats = client.forward_backward(some, "importance_sampling", logprobs=False).result().stats
        learned = time.perf_counter()
        client.optim_step(AdamParams(0.0)).result()
        client.save_weights_for_sampler(Path(folder) / "saved").result()
        saved = time.perf_counter()
        backend.close()
    fed = stats.tokens_total - stats.tokens_saved
    overhead = (saved - learned) * len(config.trained)
    return UpdateSpeed(fed, (learned - began) * how.epochs, overhead)


def time_findings(
    config: TrainConfig,
    steps: int,
    update: UpdateSpeed | None,
    *,
    rollout_s: float,
    sampled_per_s: float,
    tokens: float,
) -> list[Finding]:
    """Estimate the seconds of a step.

    Args:
        rollout_s: seconds for each rollout, at the runners' rate.
        tokens: of a rollout that go through the trainer's model.
    """
    how = config.rollouts
    count = how.batch_size * how.group_size
    total = rollout_s * count
    parts = [
        f"rollouts {_s(total)}: {count} of them by {how.runners} runners, at "
        f"{sampled_per_s:.0f} sampled tokens/s"
    ]
    if update is not None:
        speed = update.tokens / update.seconds
        learning = tokens * count / speed + update.overhead
        total += learning
        parts.append(
            f"update at most {_s(learning)}: forward and backward at {speed:.0f} tokens/s, "
            "none for groups with equal rewards"
        )
    else:
        parts.append("the update was not measured")
    run = f"a run of {steps} about {_s(total * steps)} without evaluations"
    return [Finding(f"a step takes about {_s(total)}, {run}"), *map(Finding, parts)]


def _s(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
