"""Start a vLLM server that ends with us.

Knows vLLM's command line, not its HTTP API. vLLM pins torch, so it may live in its own environment;
what runs there is vLLM's own entry point.

Run as a module, this is the process between supervisor and server: it ends the server, and every
process that the server started, when it is told to, when the supervisor is gone, or when the
server's engine has died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.commands import ModelCommand
from agentrl.config.errors import ConfigError
from agentrl.samplers.vllm.adapters import adapter_rank
from agentrl.samplers.vllm.recovery import wait_for_engine_death
from agentrl.supervisor import SupervisedProcess
from agentrl.timing import Waiting

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks that vLLM can be started with."""
_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
_START_TIMEOUT_S = 1800.0
_POLL_S = 0.1
_END_GRACE_S = 8.0
"""Less than the supervisor's."""
_MAX_LORAS = 4
"""Adapters in one batch: the current version, and older ones that still answer requests."""


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """How to start a server."""

    python: str
    model: str
    """A folder or a Hugging Face name."""
    dtype: str
    max_lora_rank: int
    on_cpu: bool
    has_experts: bool = False
    more: tuple[str, ...] = ()
    """Further arguments, which override the others."""

    def argv(self, path: str) -> list[str]:
        """Return the command of a server that listens on the socket ``path``."""
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--uds", path),
            *("--model", self.model),
            *("--dtype", self.dtype),
            *("--generation-config", "vllm"),  # ignore the model's own top_k and the like
            *("--logprobs-mode", "raw_logprobs"),
            *("--structured-outputs-config", '{"backend": "guidance"}'),
            *("--gpu-memory-utilization", "0.5"),  # the trainer may be on the same GPU
            "--enable-lora",
            *("--max-lora-rank", str(self.max_lora_rank)),
            *("--max-loras", str(_MAX_LORAS)),
            *(["--enable-mixed-moe-lora-format"] if self.has_experts else []),
            *(["--enforce-eager"] if self.on_cpu else []),  # compiling takes minutes on a CPU
            *self.more,
        ]


class VllmServer:
    """A supervised vLLM server on a socket that only this user can reach."""

    def __init__(self, command: VllmCommand, log: Path) -> None:
        self.log = log
        # In the temporary folder, because a socket's path must be short.
        self._folder = Path(tempfile.gettempdir()) / f"agentrl-vllm-{secrets.token_hex(6)}"
        self._socket = self._folder / "socket"
        self.url = f"unix:{self._socket}"
        self._command = command
        self._process: SupervisedProcess | None = None

    def start(self) -> None:
        self._folder.mkdir(mode=0o700)
        env = {**os.environ, **_ENVIRONMENT}
        if self._command.on_cpu:  # by default vLLM wants nearly all memory, and fails if it is used
            env[_CPU_CACHE_GIB] = os.environ.get(_CPU_CACHE_GIB, "4")
        leash = [sys.executable, "-m", "agentrl.samplers.vllm.server"]
        argv = [*leash, *self._command.argv(str(self._socket))]
        self._process = SupervisedProcess("vLLM", argv, self.log, env).spawn().supervise()

    def wait(self, tell: Callable[[str], object]) -> None:
        """Return when the server accepts connections; ``tell`` receives notices until then.

        Raises:
            RuntimeError: it keeps dying, or takes too long; with the end of its log.
        """
        waiting = Waiting(tell)
        while not self._listens():
            if self.restarts >= 2 or waiting.seconds > _START_TIMEOUT_S:
                raise RuntimeError(
                    f"vLLM does not start; the end of {self.log}:\n{self.log_tail()}"
                )
            waiting.still(lambda: f"vLLM starts since {waiting.seconds:.0f} s: {self.log_tail(1)}")
            time.sleep(_POLL_S)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._socket)) == 0

    @property
    def restarts(self) -> int:
        return self._process.restarts if self._process else 0

    def log_tail(self, lines: int = 20) -> str:
        return self._process.log_tail(lines) if self._process else ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def planned_server(
    config: ModelCommand, log: Path, *, max_rank: int | None, adapters: Iterable[Path] = ()
) -> VllmServer | None:
    """Return the server that the settings want started, not started yet; None: they want none.

    Args:
        max_rank: of the adapters that will be loaded; None: of ``adapters``, PEFT folders.

    Raises:
        ConfigError: as ``vllm_command``.
    """
    if config.sampler.kind != "vllm" or config.sampler.vllm.url is not None:
        return None
    if max_rank is None:
        max_rank = max(map(adapter_rank, adapters), default=_RANKS[0])
    return VllmServer(vllm_command(config, max_rank), log)


def vllm_command(config: ModelCommand, max_rank: int) -> VllmCommand:
    """Return how to start the server for these settings.

    Raises:
        ConfigError: the interpreter has no vLLM, or the rank is beyond vLLM's.
    """
    from agentrl_trainer.models.loading import resolve_model

    python = str(config.sampler.vllm.python or sys.executable)
    found = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"],
        check=False,
        capture_output=True,
    )
    if found.returncode:
        raise ConfigError(
            f"sampler.vllm.python: {python!r} has no vLLM. Install it there, or name the "
            "interpreter of an environment that has it (its own is best: vLLM pins torch)"
        )
    rank = next((r for r in _RANKS if r >= max_rank), None)
    if rank is None:
        raise ConfigError(
            f"learning.rank: vLLM serves adapters up to rank {_RANKS[-1]}, not {max_rank}"
        )
    own, trust = config.model, config.model.trust_remote_code
    model, on_cpu = resolve_model(own.name), _on_cpu(own.device)
    return VllmCommand(
        python=python,
        model=model,
        # As the trainer loads the model: the two must be one policy.
        dtype="float32" if on_cpu and own.dtype == "auto" else own.dtype,
        max_lora_rank=rank,
        on_cpu=on_cpu,
        has_experts=_has_experts(model, trust),
        more=(
            *(["--trust-remote-code"] if trust else []),
            *shlex.split(config.sampler.vllm.args),
        ),
    )


def _has_experts(model: str, trust: bool) -> bool:
    from transformers import AutoConfig

    from agentrl_trainer.models.moe import expert_count

    try:
        return expert_count(AutoConfig.from_pretrained(model, trust_remote_code=trust)) > 0
    except (OSError, ValueError):  # vLLM reports a missing model better
        return False


def _on_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run the server until it ends or has to; returns its exit code, 128 + n for signal n."""
    path = argv[argv.index("--uds") + 1]
    Path(path).unlink(missing_ok=True)  # left by a server that was killed
    env = dict(environment)
    if argv[0] != sys.executable:
        env.pop("PYTHONPATH", None)  # it is our interpreter's, and would mix two environments
    server = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(*_: object) -> None:
        threading.Thread(target=_end_group, args=(server,), daemon=True).start()

    def watch_supervisor() -> None:
        os.read(0, 1)  # the supervisor never writes: this returns when it is gone
        end()

    def watch_engine() -> None:
        if wait_for_engine_death(path, lambda: server.poll() is not None):
            end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch_engine, name="engine-watch", daemon=True).start()
    threading.Thread(target=watch_supervisor, name="parent-watch", daemon=True).start()
    code = server.wait()
    _kill_group(server)  # processes it left behind hold memory, often a GPU's
    return code if code >= 0 else 128 - code


def _end_group(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_END_GRACE_S)
    _kill_group(server)


def _kill_group(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
