"""One attempt: a fresh process that runs the agent once, and is gone.

Everything here happens in a child that a runner has just forked. Nothing returns: the process ends
with ``os._exit``, for the runner's own clean-up is none of its business.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from agentrl.runner.agent import load_agent
from agentrl.runner.config import RunnerConfig
from agentrl_tracer import agent as tracing
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim

_ERROR_CHARACTERS = 4000
_FLUSH_TIMEOUT_S = 15.0
_PARENT_CHECK_S = 0.5
_NEVER_PRELOADED = ("lancedb",)  # starts threads of its own when it is imported


@dataclass(slots=True)
class Outcome:
    """What an attempt tells its runner."""

    ok: bool
    error: str | None = None
    undelivered: bool = False  # some span or reward did not reach the gateway
    modules: list[str] = field(default_factory=list[str])  # third-party modules it imported


def run_attempt(config: RunnerConfig, claim: Claim, result_fd: int, log_path: str) -> NoReturn:
    """Runs the agent and writes the outcome, as JSON, to ``result_fd``."""
    runner_pid = os.getppid()
    os.setsid()  # a process group of our own, so that whatever the agent starts dies with it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _redirect_output(log_path)
    os.environ.update(environment(config, claim))
    threading.Thread(target=_die_with, args=(runner_pid,), daemon=True).start()
    known = set(sys.modules)
    outcome = _run(config, claim)
    outcome.modules = third_party_modules(known)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(result_fd, "wb") as pipe:
        pipe.write(
            json.dumps({name: getattr(outcome, name) for name in Outcome.__slots__}).encode()
        )
    os._exit(0)


def environment(config: RunnerConfig, claim: Claim) -> dict[str, str]:
    """What an unmodified client reads, and what ``emit_reward`` and other languages need."""
    root = f"{config.gateway}/rollouts/{claim.rollout_id}"
    values = {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_BASE": f"{root}/v1",  # langchain-openai prefers it, llama-index knows only it
        "OPENAI_API_KEY": claim.key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": claim.key,
        "AGENTRL_GATEWAY": config.gateway,
        "AGENTRL_ROLLOUT_ID": claim.rollout_id,
        "AGENTRL_ATTEMPT_ID": claim.attempt_id,
        "AGENTRL_KEY": claim.key,
        "AGENTRL_TASK": json.dumps(claim.task),
        "AGENTRL_MODEL": config.model,
        "OTEL_EXPORTER_OTLP_ENDPOINT": root,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{claim.key}",
        "TRACEPARENT": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
    }
    values.setdefault("OTEL_SERVICE_NAME", os.environ.get("OTEL_SERVICE_NAME", "agent"))
    no_proxy = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1", "localhost"]
    values["NO_PROXY"] = values["no_proxy"] = ",".join(filter(None, no_proxy))
    return values


def _run(config: RunnerConfig, claim: Claim) -> Outcome:
    error: str | None = None
    try:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": config.agent,
            "agentrl.task.id": claim.task_id,
            "agentrl.attempt.number": claim.attempt_number,
        }
        with tracing.tracing(f"invoke_workflow {config.agent}", attributes):
            agent = load_agent(config.agent)
            active = tracing.rollout_tracing()
            if active is not None:
                active.install_globally()  # after the user's module has had its chance
            result = agent(claim.task)
            nothing_emitted = active is None or active.rewards == 0
            number = isinstance(result, int | float) and not isinstance(result, bool)
            if number and nothing_emitted:
                emit_reward(result, explanation="returned by the agent")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            error = f"the agent exited with {ended.code!r}"
    except BaseException:
        traceback.print_exc()
        error = traceback.format_exc()[-_ERROR_CHARACTERS:]
    delivered = tracing.flush(_FLUSH_TIMEOUT_S)
    if not delivered and error is None:
        error = "spans or rewards did not reach the gateway"
    return Outcome(ok=error is None, error=error, undelivered=not delivered)


def third_party_modules(known: set[str]) -> list[str]:
    """Modules imported since ``known`` that come from installed packages, not from the user."""
    found: list[str] = []
    for name in sorted(set(sys.modules) - known):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None) or ""
        installed = "site-packages" in origin or "dist-packages" in origin
        if installed and name.split(".")[0] not in _NEVER_PRELOADED:
            found.append(name)
    return found


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    # Text streams of the runner may hold buffered bytes: start afresh on the new descriptors.
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _die_with(runner_pid: int) -> None:
    """An agent whose runner was killed is an orphan, and must not go on spending."""
    while os.getppid() == runner_pid:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)
