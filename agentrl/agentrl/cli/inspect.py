"""``agentrl inspect``: run a task of inspect_ai with a model or a trained adapter."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.cli import Tokens
from agentrl.cli.servers.serve import serving
from agentrl.config.commands import InspectConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.console.output import print_line, print_sentences
from agentrl.gateway.handle import fetch_model
from agentrl.interrupts import Interrupted, hold_first_signal
from agentrl.runs.best_adapter import which_adapter
from agentrl.runs.folder import adapter_folders
from agentrl_proxy.server.listening import bind, url_of

_SERVICE = "served"  # inspect reads the server's key from SERVED_API_KEY


def inspect_command(*tokens: Tokens) -> None:
    """Run a task of inspect_ai with a model or a trained adapter, and print its scores.

    Serves the model on this machine for as long as the task runs, as an OpenAI-compatible provider
    of inspect. Inspect prints its scores and where its log is; `inspect view` shows it. The calls
    are recorded in --store. The exit code is inspect's.
    """
    config = load(InspectConfig, tokens)
    program = shutil.which(config.inspect.command)
    if program is None:
        raise ConfigError(
            f"inspect.command: there is no program {config.inspect.command!r}; install inspect_ai "
            "and openai, anywhere, and give its path"
        )
    adapters = adapter_folders(config, config.model.adapter_path)
    if len(adapters) > 1:
        known = ", ".join(adapters)
        raise ConfigError(f"model.adapter_path: it has several; name one with --adapters: {known}")
    if said := which_adapter(config.model.adapter_path, adapters):
        print_sentences(said)
    fetch_model(config)
    name = next(iter(adapters), Path(config.model.name).name)
    key = secrets.token_urlsafe(24)
    sock = bind("127.0.0.1", 0, operator_key=key)
    command = [
        program, "eval", config.inspect.task, "--model", f"openai-api/{_SERVICE}/{name}",
        "--model-base-url", f"{url_of(sock)}/v1", *shlex.split(config.inspect.args),
    ]  # fmt: skip
    with serving(config, adapters, sock, key) as gateway:
        gateway.wait_ready(print_sentences)
        print_line((shlex.join(command), "dim"))
        environment = {**os.environ, f"{_SERVICE.upper()}_API_KEY": key}
        sys.exit(_run(command, environment))


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of inspect, which at Ctrl-C writes its log before it ends."""
    inspect = None
    try:
        with hold_first_signal():  # else Popen may be left with inspect running
            inspect = subprocess.Popen(command, env=environment)
        return inspect.wait()
    except Interrupted as ended:
        if inspect is not None:
            if ended.code != 128 + signal.SIGINT:  # which has reached inspect as well
                inspect.send_signal(signal.SIGINT)
            inspect.wait()
        raise
