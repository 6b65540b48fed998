"""Start the pool of runners as a subprocess of the trainer, which has threads and must not fork."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path

from agentrl.process_privacy import environment_without
from agentrl.runner.agent_process.confinement import check_confinement
from agentrl.runner.agent_process.environment import (
    check_environment,
    find_certificates_by_name,
)
from agentrl.runner.agent_process.external_python import check_python
from agentrl.runner.agent_spec import parse_agent, validate_agent
from agentrl.runner.protocol import RunnerConfig
from agentrl.supervisor import SupervisedProcess

_STOP_GRACE_S = 8.0


def start_pool(config: RunnerConfig) -> SupervisedProcess:
    """Start runners, which wait by themselves until the gateway answers.

    The process is not supervised yet: that starts a thread. When it is stopped, running attempts go
    back to the queue.

    Raises:
        ValueError: the agent's spec is wrong, or its interpreter cannot run it.
        RuntimeError: the environment would silence the agents' spans.
    """
    check_environment()
    config = replace(config, pool=secrets.token_hex(4))
    # By default attempts are forks on Linux and fresh interpreters elsewhere.
    method = "fork" if sys.platform == "linux" else "spawn"
    if config.python is not None:
        config = replace(config, python=check_python(config.python))
    elif config.sandbox or os.environ.get("AGENTRL_START_METHOD", method) == "spawn":
        config = replace(config, python=sys.executable)
    if config.concurrency > 1 and parse_agent(config.agent).kind == "command":
        raise ValueError(
            f"concurrency: got {config.concurrency}, but a command runs in a process of its own; "
            "raise runners instead"
        )
    validate_agent(config.agent, other_python=config.python is not None)
    check_confinement(config)
    env = environment_without(config.withheld)
    find_certificates_by_name(env)
    if sys.platform == "darwin":
        # macOS kills forked children whose parent has touched Objective-C, as many libraries do
        # when they are imported.
        env.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
    Path(config.logs).mkdir(mode=0o700, parents=True, exist_ok=True)
    # A store URL may hold a password, which ``argv`` and the environment would show to others. The
    # end of the standard input tells the pool that the trainer is gone, ``kill -9`` included.
    return SupervisedProcess(
        "the pool of runners",
        [sys.executable, "-m", "agentrl.runner"],
        Path(config.logs) / "runners.log",
        env,
        stdin=config.to_json().encode() + b"\n",
        grace_s=_STOP_GRACE_S,
    ).spawn()
