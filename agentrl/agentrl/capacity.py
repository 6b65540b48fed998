"""How much to do at once: CPU cores, threads of sampler and trainer, and runners.

In a synchronous run the sampler rests while the trainer updates, so each may use all cores. Where
both are busy at once (``max_staleness``), they share: two threads of one computation that wait for
a core which another process keeps are slower than one.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.filesize import decimal

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.runner.agent_spec import parse_agent
from agentrl_trainer.models.host_memory import ADAM_BYTES, free_on_host, model_size
from agentrl_trainer.names import TINY_MODEL

_WORTH_THREADS = 20_000_000
"""Parameters of a model below which a second thread costs more than it computes."""


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, its container, OMP_NUM_THREADS."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:  # macOS
        count = os.cpu_count() or 1
    limits = [count]
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal():
        limits.append(int(asked))
    try:  # "max 100000", or microseconds in a period
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limits.append(-(-int(quota) // int(period)))
    except (OSError, ValueError):  # no limit, or no cgroups (version 2)
        pass
    return max(1, min(limits))


def trainer_threads(cores: int, parameters: int, *, alone: bool) -> int:
    """Return the threads of an update; ``alone``: the sampler rests meanwhile."""
    if parameters < _WORTH_THREADS:
        return 1
    return cores if alone else max(1, cores // 2)


def sampler_threads(cores: int, parameters: int, *, alone: bool) -> int:
    """Return the threads of a sampler; ``alone``: no trainer computes beside it.

    From four cores on, a quarter is left to the agents and the gateway's other threads.
    """
    if parameters < _WORTH_THREADS:
        return 1
    return max(1, cores - cores // 4 if alone else cores // 2)


_OF_A_CORE, _MANY_RUNNERS = 16, 64
"""Runners: more would wait for a core, and a step of sampling for more than 64 answers takes longer
in proportion."""
_RUNNER_BYTES = 200_000_000
"""What an agent's process takes: 30 MB beside what it shares with its fork server, 100 to 200 with
a framework."""
_PROMPT_TOKENS = 1024
"""Of a rollout whose length is not known yet."""


def choose_runners(config: TrainConfig | EvalConfig, rollouts: int) -> str | None:
    """Set the number of runners where the settings do not; return it with the reason, in one line.

    A step of sampling reads all weights, for one answer as for many. So answers are quicker
    together, as long as their agents' processes are cheap: forks, not commands or interpreters.

    Args:
        rollouts: of a step, or of an evaluation.
    """
    how, agent = config.rollouts, config.agent
    if "runners" in how.model_fields_set:
        return None
    if how.runners_on == "ray":
        why = "the default on Ray"
    elif agent.sandbox or agent.python or parse_agent(agent.entrypoint).kind == "command":
        why = "the default where each agent is a program of its own"
    elif config.model.name == TINY_MODEL:
        why = f"the default for {TINY_MODEL}, which answers sooner than more agents ask"
    else:
        cores = config.model.cores or available_cores()
        room, said = _room_for_agents(config)
        limits = {
            f"{_OF_A_CORE} for each of {cores} cores": _OF_A_CORE * cores,
            "with more, each answer takes longer": _MANY_RUNNERS,
            f"a step or an evaluation has {rollouts} rollouts": rollouts,
            f"memory holds {room}: {said}": room,
        }
        why = min(limits, key=limits.__getitem__)
        if limits[why] < how.runners:
            why = f"the default; {why}"
        else:
            how.runners = limits[why]
    return f"{how.runners} runners (rollouts.runners): {why}"


def _room_for_agents(config: TrainConfig | EvalConfig) -> tuple[int, str]:
    """Return how many agents have room in half of the memory that the models leave, and why.

    The other half is for activations, the sampler's merged weights and what cannot be foreseen.
    """
    free, of_agent, model = free_on_host(), _RUNNER_BYTES, config.model
    known = model_size(model.name) if _on_host(model.device) else None
    if known is not None:
        if isinstance(config, TrainConfig) and config.run.backend == "local":
            parameters = config.learning.rank * known.widths * len(config.trained)
            free -= known.weights + ADAM_BYTES * parameters
        if config.sampler.kind == "embedded":
            free -= known.weights * config.gateway_count
            of_agent += known.of_token * (_PROMPT_TOKENS + config.sampler.max_tokens)
    left = max(free, 0)
    leaves = "is free" if known is None else "the model leaves"
    said = f"{decimal(of_agent)} each in half of the {decimal(left)} that {leaves}"
    return left // 2 // of_agent, said


def _on_host(device: str) -> bool:
    """Whether a model on this device takes the machine's memory; a Mac's GPU does."""
    return device in ("cpu", "mps") or (device == "auto" and not Path("/dev/nvidia0").exists())
