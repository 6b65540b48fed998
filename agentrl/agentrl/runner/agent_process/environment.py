"""Compute the environment in which an unmodified agent finds the gateway.

Knows the variables that clients, OpenTelemetry and frameworks read. Functions return mappings; only
the attempt's own process puts them into ``os.environ``.
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

from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import Claim

# One variable may hold 128 KiB on Linux; a longer one makes every later subprocess fail to start.
_LONGEST_TASK = 100_000
_EXPORTER_VARIABLES = ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "TRACES_HEADERS")
_EXPORTER_KEY = "authorization=Bearer%20sk-agentrl-"
_HASHED_CERTIFICATE = re.compile(r"[0-9a-f]{8}\.[0-9]+")  # the names that `openssl rehash` gives

# Frameworks read these when they are imported: the pool sets them before it preloads.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    # Otherwise ``import litellm`` fetches a file from the internet, in every attempt.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # Spans of agents and tools, and none of AutoGen's messages, which are ten times as many.
    "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS": "true",
    "AUTOGEN_DISABLE_RUNTIME_TRACING": "true",
}


def check_environment() -> None:
    """Refuse an environment that would silence the agents' spans and rewards.

    Raises:
        RuntimeError: OTEL_SDK_DISABLED is set.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise RuntimeError(
            "OTEL_SDK_DISABLED=true is set: it would silently drop every reward and span of the "
            "agent. Unset it; to quiet CrewAI use CREWAI_DISABLE_TELEMETRY=true (set for agents)"
        )


def find_certificates_by_name(env: dict[str, str]) -> None:
    """Make TLS clients find certificates in a hashed folder instead of parsing a whole bundle.

    A bundle costs each new OpenAI client 15 to 25 ms of CPU, even one that speaks plain HTTP with
    the gateway; a folder costs nothing until a certificate is needed. Changes ``env`` only where
    the folder is the trust store in use: a bundle from another place stays chosen.
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
    """Return the variables that keep clients from asking a proxy for the gateway."""
    direct = ["127.0.0.1", "localhost", "::1", urlsplit(gateway).hostname or ""]
    env: dict[str, str] = {}
    for name in ("NO_PROXY", "no_proxy"):
        present = [host for host in inherited.get(name, "").split(",") if host]
        env[name] = ",".join(dict.fromkeys([*present, *filter(None, direct)]))
    return env


def attempt_environment(
    config: RunnerConfig, claim: Claim, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables to set for one attempt, on top of ``inherited``."""
    base = f"{config.gateway}/rollouts/{claim.rollout_id}"
    env = client_environment(config, base, claim.key, inherited) | {
        "AGENTRL_ROLLOUT_ID": claim.rollout_id,
        "AGENTRL_ATTEMPT_ID": claim.attempt_id,
        "AGENTRL_KEY": claim.key,
    }
    # An exporter that the application has configured keeps its backend and its credentials. A
    # reused process still has the variables of the attempt before.
    configured = [inherited.get(f"OTEL_EXPORTER_OTLP_{name}", "") for name in _EXPORTER_VARIABLES]
    ours = f"{config.gateway}/rollouts/", _EXPORTER_KEY
    if all(value.startswith(ours) for value in configured if value):
        env |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": base,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{claim.key}",
        }
    task = json.dumps(claim.task)
    if len(task) <= _LONGEST_TASK:
        env["AGENTRL_TASK"] = task
    return env | storage_environment(claim.attempt_id, inherited)


def client_environment(
    config: RunnerConfig, base: str, key: str, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that lead the clients of models to a base URL with a key."""
    env = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",  # langchain-openai prefers it, llama-index knows no other
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "AGENTRL_GATEWAY": config.gateway,
        "AGENTRL_MODEL": config.model,
        **QUIET,
        **direct_to_gateway(config.gateway, inherited),
    }
    if "OTEL_SERVICE_NAME" not in inherited:
        env["OTEL_SERVICE_NAME"] = "agentrl-agent"
    return env


def storage_environment(owner: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that give an attempt, or a process that attempts share, own storage.

    A rollout must not be answered from DSPy's cache of another one, nor remember it by CrewAI's
    memory. A storage of CrewAI's that the user chose stays chosen.
    """
    folder, ours = str(storage_folder(owner)), str(storage_folder(""))
    env = {"DSPY_CACHEDIR": f"{folder}/dspy", "AGENTRL_ATTEMPT_FOLDER": folder}
    if inherited.get("CREWAI_STORAGE_DIR", ours).startswith(ours):  # of the attempt before
        env["CREWAI_STORAGE_DIR"] = folder
    return env


def storage_folder(owner: str) -> Path:
    """Return what frameworks store in; it is removed when the process has ended."""
    return Path(tempfile.gettempdir()) / f"agentrl-{owner}"


def shared_owner(config: RunnerConfig, pid: int) -> str:
    """Name the storage of a process that attempts share."""
    return f"{config.run_id}-{pid}"
