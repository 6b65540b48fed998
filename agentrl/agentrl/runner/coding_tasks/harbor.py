"""Run a rollout as a trial of Harbor (https://harborframework.com), which brings agent and tests.

Harbor runs as a program of its own environment, for it pins much and needs Python 3.12. Its agent
gets the rollout's base URL and key from the variables that model clients read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.runner.protocol import HARBOR_GRACE_S, AttemptFailed
from agentrl_tracer.emit import emit, emit_reward
from agentrl_tracer.schemas import AttemptState, Json

_ANTHROPIC = ("claude-code",)
"""Harbor's agents that speak to Anthropic's API."""
_LATE = ("AgentTimeoutError",)
_INFRASTRUCTURE = (
    "AddTestsDirError", "AgentSetupTimeoutError", "ApiConnectionError", "APIConnectionError",
    "ApiInternalServerError", "ApiOverloadedError", "ApiRateLimitError", "DownloadVerifierDirError",
    "EnvironmentStartTimeoutError", "HealthcheckError", "InternalServerError",
    "NetworkConnectionError", "SandboxBuildFailedError", "ServiceUnavailableError",
)  # fmt: skip
_SHOWN = 2000  # characters of what Harbor said


def harbor_tasks(path: Path, settings: Json) -> list[Json]:
    """Return Harbor's tasks in a folder, or the one that it is.

    Args:
        settings: how Harbor runs them: ``agent``, ``environment``, ``command``, ``host``.

    Raises:
        ValueError: there is no task.
    """
    found = sorted(one.parent for one in (*path.glob("task.toml"), *path.glob("*/task.toml")))
    if not found:
        raise ValueError(
            f"{path} holds no Harbor task (a folder with task.toml); a registered dataset is "
            "fetched by: harbor download NAME -o FOLDER"
        )
    tasks: list[Json] = []
    for folder in found:
        instruction = folder / "instruction.md"
        said = instruction.read_text(encoding="utf-8") if instruction.is_file() else ""
        harbor = settings | {"path": str(folder.resolve())}
        tasks.append({"instruction": said, "harbor": harbor})
    return tasks


def run_trial(task: Json) -> None:
    """Run a trial of the task, and emit what its verifier says as rewards.

    Raises:
        AttemptFailed: Harbor did not run the trial, or its result has an exception or no reward.
    """
    given = task.get("harbor")
    if not isinstance(given, dict):
        raise AttemptFailed("harbor: the task names none; give `harbor:PATH` as the agent")
    config = trial_config(given)
    folder = Path(config["trials_dir"]) / config["trial_name"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [given["command"], "trial", "start", "--config", file.name]
        code = _run(command, _environment(given["host"]))
    try:
        result = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        why = f"harbor: the trial left no result (exit code {code}); see {folder}"
        raise AttemptFailed(why, AttemptState.INFRASTRUCTURE) from None
    _report(result, folder)


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run Harbor; at the attempt's time limit, let it remove the trial's containers."""
    try:
        # A session of its own: SIGTERM, which the attempt's group gets, would end it at once.
        process = subprocess.Popen(command, env=env, start_new_session=True)
    except OSError as error:
        raise AttemptFailed(f"harbor: cannot run {command[0]}: {error}") from error
    try:
        return process.wait()
    except SystemExit:  # of SIGTERM
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HARBOR_GRACE_S)
        raise


def trial_config(given: Json) -> Json:
    """Return the configuration of this attempt's trial."""
    attempt, model = os.environ["AGENTRL_ATTEMPT_ID"], os.environ["AGENTRL_MODEL"]
    agent, environment = given["agent"], given["environment"]
    provider = "anthropic" if agent in _ANTHROPIC else "openai"
    return {
        "task": {"path": given["path"]},
        "trial_name": f"{Path(given['path']).name[:40]}-{attempt}",
        "trials_dir": str(Path("trials").absolute()),
        "agent": {
            "import_path" if ":" in agent else "name": agent,
            "model_name": f"{provider}/{model}",
        },
        "environment": {"import_path" if ":" in environment else "type": environment},
    }


def _environment(host: str | None) -> dict[str, str]:
    """Return the variables of Harbor, which passes on what its agent reads."""
    env = {name: value for name, value in os.environ.items() if name != "AGENTRL_TASK"}
    gateway = env.get("AGENTRL_GATEWAY", "")
    if host is None or not gateway:
        return env
    parts = urlsplit(gateway)
    reached = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
    return {name: value.replace(gateway, reached) for name, value in env.items()}


def _report(result: Json, folder: Path) -> None:
    verified: Json = (result.get("verifier_result") or {}).get("rewards") or {}
    raised: Json = result.get("exception_info") or _of_a_step(result) or {}
    kind, message = raised.get("exception_type"), raised.get("exception_message")
    note: dict[str, Any] = {"trial": str(folder), "rewards": verified}
    if raised:
        note["error"] = " ".join(f"{kind}: {message}".split())[:_SHOWN]
    emit("harbor", note)
    if raised:
        state = AttemptState.TIMEOUT if kind in _LATE else AttemptState.ERROR
        not_up = result.get("environment_setup") and not result.get("agent_setup")
        state = AttemptState.INFRASTRUCTURE if kind in _INFRASTRUCTURE or not_up else state
        raise AttemptFailed(f"harbor: {note['error']}; see {folder}", state)
    if not verified:
        raise AttemptFailed(f"harbor: the verifier gave no reward; see {folder}")
    emit_reward({"reward": verified["reward"]} if "reward" in verified else verified)


def _of_a_step(result: Json) -> Json | None:
    steps = result.get("step_results") or []
    return next((step["exception_info"] for step in steps if step.get("exception_info")), None)
