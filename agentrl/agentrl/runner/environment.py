"""What an attempt's environment says, so that an unmodified agent finds the gateway.

Knows the variables that clients, OpenTelemetry and frameworks read. Pure: returns a mapping, which
only the attempt's own process puts into ``os.environ``.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.runner.config import RunnerConfig
from agentrl_tracer.schemas import Claim

# One variable may hold 128 KiB on Linux; a longer one makes every later subprocess fail to start.
_LONGEST_TASK = 100_000
_HASHED_CERTIFICATE = re.compile(r"[0-9a-f]{8}\.[0-9]+")  # the names that `openssl rehash` gives

# What frameworks read when they are *imported*: the pool sets it before it preloads them.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    # Otherwise ``import litellm`` fetches a file from the internet, in every attempt.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def storage_folder(attempt_id: str) -> Path:
    """Where CrewAI keeps an attempt's memory; concurrent ones would share one otherwise."""
    return Path(tempfile.gettempdir()) / f"agentrl-{attempt_id}"


def _is_storage(path: Path) -> bool:
    return path.parent == Path(tempfile.gettempdir()) and path.name.startswith("agentrl-")


def look_certificates_up_by_name(env: dict[str, str]) -> None:
    """Makes TLS clients find certificates in a hashed folder instead of parsing a whole bundle.

    A bundle costs each new OpenAI client 15 to 25 ms of CPU, even one that speaks plain HTTP with
    the gateway; a folder costs nothing until a certificate is needed. Changed only where the
    folder is the trust store in use: a bundle chosen from elsewhere stays chosen.
    """
    folder = env.get("SSL_CERT_DIR") or ssl.get_default_verify_paths().capath
    bundle = env.get("SSL_CERT_FILE")
    if not folder or not Path(folder).is_dir():
        return
    if bundle and Path(bundle).parent.resolve() != Path(folder).resolve():
        return
    if any(_HASHED_CERTIFICATE.fullmatch(name) for name in os.listdir(folder)):
        env["SSL_CERT_DIR"] = folder
        env.pop("SSL_CERT_FILE", None)


def direct_to_gateway(gateway: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that keep clients from asking a proxy for the gateway."""
    direct = ["127.0.0.1", "localhost", "::1", urlsplit(gateway).hostname or ""]
    env: dict[str, str] = {}
    for name in ("NO_PROXY", "no_proxy"):
        present = [host for host in inherited.get(name, "").split(",") if host]
        env[name] = ",".join(dict.fromkeys([*present, *filter(None, direct)]))
    return env


def shared_environment(
    config: RunnerConfig, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of a process that several attempts share: the gateway's, and nobody's key.

    Whose a call is, a header says; one that escapes it is refused, not misattributed.
    """
    gateway = config.gateway.rstrip("/")
    env = {
        "OPENAI_BASE_URL": f"{gateway}/v1",
        "OPENAI_API_BASE": f"{gateway}/v1",
        "OPENAI_API_KEY": "sk-shared-process",
        "ANTHROPIC_BASE_URL": gateway,
        "ANTHROPIC_API_KEY": "sk-shared-process",
        "AGENTRL_GATEWAY": gateway,
        "AGENTRL_MODEL": config.model,
        **QUIET,
        **direct_to_gateway(gateway, inherited),
    }
    if "OTEL_SERVICE_NAME" not in inherited:
        env["OTEL_SERVICE_NAME"] = "agentrl-agent"
    return env


def attempt_environment(
    config: RunnerConfig, claim: Claim, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables to set for one attempt, on top of ``inherited``."""
    gateway = config.gateway.rstrip("/")
    base = f"{gateway}/rollouts/{claim.rollout_id}"
    env = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",  # langchain-openai prefers it, llama-index knows no other
        "OPENAI_API_KEY": claim.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": claim.key,
        "AGENTRL_GATEWAY": gateway,
        "AGENTRL_ROLLOUT_ID": claim.rollout_id,
        "AGENTRL_ATTEMPT_ID": claim.attempt_id,
        "AGENTRL_KEY": claim.key,
        "AGENTRL_MODEL": config.model,
        **QUIET,
    }
    # An exporter that the application has configured keeps its backend: we are another's guest.
    ours = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": base,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{claim.key}",
    }
    theirs = inherited.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if theirs is None or theirs.startswith(f"{gateway}/rollouts/"):  # of the attempt before
        env |= ours
    task = json.dumps(claim.task)
    if len(task) <= _LONGEST_TASK:
        env["AGENTRL_TASK"] = task
    if "OTEL_SERVICE_NAME" not in inherited:
        env["OTEL_SERVICE_NAME"] = "agentrl-agent"
    storage = inherited.get("CREWAI_STORAGE_DIR")
    if storage is None or _is_storage(Path(storage)):  # none, or that of the attempt before
        env["CREWAI_STORAGE_DIR"] = str(storage_folder(claim.attempt_id))
    env |= direct_to_gateway(gateway, inherited)
    if config.python_path:
        path = [*config.python_path, *filter(None, [inherited.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(path)
    return env
