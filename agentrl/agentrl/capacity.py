"""How much to do at once: CPU cores, threads of sampler and trainer, and runners.

In a synchronous run the sampler rests while the trainer updates, so each may use all cores. Where
both are busy at once (``max_staleness``), they share: two threads of one computation that wait for
a core which another process keeps are slower than one.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from agentrl.config.settings.agent import AgentSettings
from agentrl.config.settings.rollouts import RunnerSettings
from agentrl.runner.agent_spec import parse_agent
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


_MANY_RUNNERS = 32
_RUNNER_BYTES = 200_000_000
"""What an agent's process takes: 30 MB beside what it shares with its fork server, 100 to 200 with
a framework."""


def choose_runners(
    model: str, agent: AgentSettings, how: RunnerSettings, rollouts: int
) -> str | None:
    """Raise the default number of runners where more cost little; return why, None if it stays.

    A step of sampling reads all weights, for one answer as for many. So answers are quicker
    together, as long as their agents' processes are cheap: forks, not commands or interpreters.

    Args:
        rollouts: of a step, or of an evaluation; there is no use for more runners.
    """
    cheap = parse_agent(agent.entrypoint).kind != "command" and not agent.python
    given = "runners" in how.model_fields_set or how.runners_on == "ray"
    if given or model == TINY_MODEL or agent.sandbox or not cheap:
        return None
    room = psutil.virtual_memory().available // 2 // _RUNNER_BYTES
    runners = min(_MANY_RUNNERS, rollouts, room)
    if runners <= how.runners:
        return None
    how.runners = runners
    return (
        f"{runners} runners: many answers are sampled at once for little more than the price of "
        "one, and this agent's processes are cheap (rollouts.runners)"
    )
