"""Examine the rollouts of a check: everything that a training would meet, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agentrl.capacity import available_cores, trainer_threads
from agentrl.check.resources import (
    measure_update,
    memory_findings,
    memory_need,
    time_findings,
)
from agentrl.check.rollouts import call_findings, token_findings, trajectories_of
from agentrl.check.signal import verdict
from agentrl.check.template import template_findings
from agentrl.config.commands import CheckConfig
from agentrl.findings import Finding, Thinking, answered
from agentrl.training.rollout_queue import seconds_of_running
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Call, Rollout
from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow, to_training_row
from agentrl_trainer.memory import estimate_memory
from agentrl_trainer.models.devices import choose_device, free_memory
from agentrl_trainer.models.loading import load_facts


def examine(
    config: CheckConfig,
    steps: int,
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Mapping[str, float | None],
) -> dict[str, list[Finding]]:
    """Return the findings by line of the report.

    Args:
        steps: of the training.
        calls: of the rollouts, with their requests.
        rewards: by rollout; None: it has none.
    """
    model = config.model
    source = config.tinker.tokenizer or model.name
    known = load_facts(source, trust_remote_code=model.trust_remote_code)
    renderer = Renderer(known.tokenizer)
    winners = {rollout.winner for rollout in rollouts}
    won = [call for call in calls if call.attempt_id in winners]
    length = config.learning.max_length or known.context_length
    adapter = next(iter(config.trained))
    cut = trajectories_of(won, adapter, length)
    rows = [to_training_row(path, dict.fromkeys(path.call_ids, 1.0)) for path in cut.trajectories]
    done = max(len(winners - {None}), 1)
    with_tools = sum(bool(call.request and call.request.get("tools")) for call in won)
    thinking, wanted = Thinking.of(renderer), config.sampler.thinking
    found = {
        "template": [*template_findings(renderer, wanted, calls_with_tools=with_tools)],
        "calls": [*call_findings(won, done)],
        "tokens": [
            *token_findings(won, cut, done, max_tokens=config.sampler.max_tokens, max_length=length)
        ],
    }
    if thinking is not None and any(map(thinking.tokens, some := answered(won))):
        found["tokens"].append(thinking.finding(some, wanted=wanted))
    if rows:
        found |= _resources(config, steps, rollouts, won, rows)
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        mine = by_task.setdefault(rollout.task_id, [])
        mine += [reward for reward in (rewards[rollout.id],) if reward is not None]
    found["signal"] = [verdict([*by_task.values()], config)]
    return found


def _resources(
    config: CheckConfig,
    steps: int,
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rows: Sequence[TrainingRow],
) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    model, learning, update = config.model, config.learning, None
    if config.run.backend == "local":
        device = choose_device(model.device)
        estimate = estimate_memory(
            model.name, rank=learning.rank, device=device, dtype=model.dtype,
            load_in_4bit=model.load_in_4bit,
            gradient_checkpointing=learning.gradient_checkpointing,
        )  # fmt: skip
        fits = True
        if estimate is not None:
            need = memory_need(
                config, estimate, rows, rollouts=len(rollouts), device=device.type,
                free=free_memory(device), threads=trainer_threads(
                    model.cores or available_cores(), estimate.parameters,
                    alone=not config.rollouts.max_staleness,
                ),
            )  # fmt: skip
            found["memory"], fits = memory_findings(need, config), need.fits
        remarks: list[str] = []
        try:
            update = measure_update(config, rows, remarks.append) if fits else None
        except torch.OutOfMemoryError:
            lower = "lower learning.micro_batch_tokens, or choose a smaller model"
            found.setdefault("memory", []).append(Finding("an update ran out of memory", lower))
        found |= {"model": [*map(Finding, remarks)]} if remarks else {}
    running = seconds_of_running(rollouts)
    found["time"] = time_findings(
        config, steps, update,
        rollout_s=running / len(rollouts),
        sampled_per_s=sum(len(call.response_ids) for call in calls) / running,
        tokens=count_tokens(rows).unique / len(rollouts),
    )  # fmt: skip
    return found
