"""Say whether a training fits into memory, and how long its steps take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from rich.filesize import decimal

from agentrl.capacity import available_cores
from agentrl.config.commands import TrainConfig
from agentrl.findings import Finding
from agentrl.training.setup.algorithm import update_settings
from agentrl.training.setup.clients import create_clients, token_budget_of
from agentrl_trainer.client import AdamParams
from agentrl_trainer.data.packing import count_tokens, pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import TOKENS_PER_THREAD
from agentrl_trainer.memory import estimate_memory
from agentrl_trainer.models.devices import choose_device, free_memory

_OF_MEMORY = 0.9
"""What may be filled by an estimate."""
_MEASURED = 4096
"""Most tokens of the update that is measured."""


def memory_findings(
    config: TrainConfig, rows: Sequence[TrainingRow], of_agents: Callable[[int], int]
) -> Iterator[Finding]:
    """Say what trainer, sampler and agents need of the model's device, and what to lower.

    ``of_agents``: bytes of the processes of so many rollouts, which take none of a CUDA GPU.
    """
    how, model, learning = config.rollouts, config.model, config.learning
    device = choose_device(model.device)
    budget = token_budget_of(model, learning)
    enough = TOKENS_PER_THREAD * (model.cores or available_cores())
    packed = pack(rows, token_budget=budget, enough=enough if device.type == "cpu" else None)
    in_flight = min(how.runners * how.concurrency, how.batch_size * how.group_size)
    cached = in_flight * max(len(row.tokens) for row in rows)
    parts = estimate_memory(
        model.name, device=device, dtype=model.dtype, load_in_4bit=model.load_in_4bit,
        rank=learning.rank, adapters=len(config.trained),
        gradient_checkpointing=learning.gradient_checkpointing,
        parts=config.parts_of_base,
        sampler_weights=config.sampler.weights,
        tokens=max(batch.input_ids.numel() for batch in packed),
        cached=min(cached, config.sampler.kv_tokens or cached)
        if config.sampler.kind == "embedded" else 0,
    )  # fmt: skip
    if parts is None:
        yield Finding("not known for this model's architecture")
        return
    if "sampler" in parts:  # a copy of the model in each
        gpus = torch.cuda.device_count() if model.device in ("auto", "cuda") else 0
        parts["sampler"] *= -(-config.gateway_count // max(1, gpus))
    if device.type != "cuda" and (taken := of_agents(in_flight)):
        parts[f"{in_flight} agents"] = taken
    yield compare(parts, free_memory(device), device.type)
    yield Finding(" + ".join(f"{decimal(size)} {name}" for name, size in parts.items()))


def compare(parts: Mapping[str, int], free: int, device: str) -> Finding:
    """Compare what is needed with what is there."""
    total, largest = sum(parts.values()), max(parts, key=parts.__getitem__)
    said = f"about {decimal(total)} of {decimal(free)} free on {device}"
    if total <= _OF_MEMORY * free:
        return Finding(f"{said}: fits")
    helps = "choose a smaller model, model.dtype bfloat16, load_in_4bit or learning.shard_base"
    if "activations" in largest:
        helps = "lower learning.micro_batch_tokens, or set learning.gradient_checkpointing"
    elif "KV" in largest or "agents" in largest:
        helps = "lower --runners"
    return Finding(f"{said}: does not fit", helps, stops=True)


def time_finding(steps: int, rollouts: float, update: float | None, teaches: float) -> Finding:
    """Estimate how long a step takes, of whose groups a share teaches, and the whole run.

    Args:
        update: seconds with all groups; None: not known.
    """
    total, parts = rollouts, f"rollouts {rollouts:.1f} s"
    if update is not None:
        total += teaches * update
        parts += f", update {teaches * update:.1f} s, or {update:.1f} s where every group teaches"
    run = timedelta(seconds=round(total * steps))
    return Finding(f"a step {total:.1f} s ({parts}); {steps} steps {run} and the evaluations")


def seconds_per_token(config: TrainConfig, rows: Sequence[TrainingRow]) -> float:
    """Measure an update of a fresh adapter, which is thrown away, with some of the rows.

    The first forward and backward, of one row, is not measured: it allocates and compiles.
    """
    some = sorted(rows, key=lambda row: row.tokens)  # those that share a prefix are neighbors
    while len(some) > 1 and count_tokens(some).unique > _MEASURED:
        some = some[: len(some) // 2]
    with tempfile.TemporaryDirectory() as folder:
        backend = create_clients(config, Path(folder), note=lambda _: None)
        client = next(iter(backend.clients.values()))
        client.forward_backward(some[:1], "importance_sampling", logprobs=False).result()
        began = time.perf_counter()
        for _ in range(update_settings(config).epochs):
            client.forward_backward(some, "importance_sampling", logprobs=False).result()
            client.optim_step(AdamParams(0.0)).result()
        client.save_weights_for_sampler(Path(folder) / "saved").result()
        seconds = time.perf_counter() - began
        backend.close()
    return seconds / count_tokens(some).unique
