"""Starting a vLLM server, and seeing to it that it ends with us.

Knows vLLM's command line. Does not know its HTTP API, nor samplers. vLLM pins torch, so it may live
in an environment of its own: what runs there is its own entry point, nothing of ours.

Run as a module, this is the process between supervisor and server: it ends the server, and every
process that the server started, when it is told to or when the supervisor is gone.
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
from agentrl.supervisor import SupervisedProcess, python_module
from agentrl.timing import Waiting

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those vLLM has room for
_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",  # it would phone home
    "DO_NOT_TRACK": "1",
}
_CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
_START_TIMEOUT_S = 1800.0  # it loads, compiles and warms up
_POLL_S = 0.1
_END_GRACE_S = 8.0  # less than the supervisor's
_LOAD_GRACE = 4
"""Adapters in one batch: the current version and older ones whose answers are still under way."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How to start a server."""

    python: str
    model: str  # a folder or a Hugging Face name
    dtype: str
    max_lora_rank: int
    on_cpu: bool
    has_experts: bool = False
    more: tuple[str, ...] = ()  # further arguments; these win


class VllmServer:
    """A supervised vLLM server on a socket that only this user can reach."""

    def __init__(self, settings: VllmSettings, log: Path) -> None:
        self.log = log
        # In the temporary folder: a socket's path must be short.
        self._folder = Path(tempfile.gettempdir()) / f"agentrl-vllm-{secrets.token_hex(6)}"
        self._socket = self._folder / "socket"
        self.url = f"unix:{self._socket}"
        self._settings = settings
        self._process: SupervisedProcess | None = None

    def start(self) -> None:
        self._folder.mkdir(mode=0o700)
        self._process = SupervisedProcess(
            "vLLM",
            python_module(
                "agentrl.samplers.vllm.server", *server_command(self._settings, str(self._socket))
            ),
            self.log,
            env=_ENVIRONMENT | (_cpu_memory() if self._settings.on_cpu else {}),
        )

    def wait(self, tell: Callable[[str], object]) -> None:
        """Returns when it accepts connections; ``tell`` hears now and then how far it is.

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
    """The server that the configuration wants started, not started yet; None: it wants none.

    Args:
        max_rank: of the adapters that will be loaded; None: only ``adapters``, PEFT folders.

    Raises:
        ConfigError: as ``vllm_settings``.
    """
    if config.sampler.kind != "vllm" or config.sampler.vllm.url is not None:
        return None
    if max_rank is None:
        max_rank = max(map(adapter_rank, adapters), default=_RANKS[0])
    return VllmServer(vllm_settings(config, max_rank), log)


def vllm_settings(config: ModelCommand, max_rank: int) -> VllmSettings:
    """How the configuration wants its server.

    Raises:
        ConfigError: there is no vLLM where it says, or the rank is beyond vLLM's.
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
    on_cpu = _on_cpu(config.model.device)
    return VllmSettings(
        python=python,
        model=resolve_model(config.model.name),
        # As the trainer loads the model: the two must be one policy.
        dtype="float32" if on_cpu and config.model.dtype == "auto" else config.model.dtype,
        max_lora_rank=rank,
        on_cpu=on_cpu,
        has_experts=_has_experts(resolve_model(config.model.name), config.model.trust_remote_code),
        more=(
            *(["--trust-remote-code"] if config.model.trust_remote_code else []),
            *shlex.split(config.sampler.vllm.args),
        ),
    )


def server_command(settings: VllmSettings, path: str) -> list[str]:
    return [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--uds", path),
        *("--model", settings.model),
        *("--dtype", settings.dtype),
        *("--generation-config", "vllm"),  # not the model's own top_k and the like
        *("--logprobs-mode", "raw_logprobs"),
        *("--structured-outputs-config", '{"backend": "guidance"}'),
        *("--gpu-memory-utilization", "0.5"),  # the trainer may be on the same GPU
        "--enable-lora",
        *("--max-lora-rank", str(settings.max_lora_rank)),
        *("--max-loras", str(_LOAD_GRACE)),
        *(["--enable-mixed-moe-lora-format"] if settings.has_experts else []),
        *(["--enforce-eager"] if settings.on_cpu else []),  # there, compiling takes minutes
        *settings.more,
    ]


def _has_experts(model: str, trust: bool) -> bool:
    from transformers import AutoConfig

    from agentrl_trainer.models.moe import expert_count

    try:
        return expert_count(AutoConfig.from_pretrained(model, trust_remote_code=trust)) > 0
    except (OSError, ValueError):  # no such model: vLLM says it better
        return False


def _on_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _cpu_memory() -> dict[str, str]:
    """By default vLLM wants nearly all of the memory, and does not start where it is not free."""
    return {_CPU_CACHE_GIB: os.environ.get(_CPU_CACHE_GIB, "4")}


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the server until it ends, or until it shall."""
    path = argv[argv.index("--uds") + 1]
    Path(path).unlink(missing_ok=True)  # of a server that was killed
    env = dict(environment)
    if argv[0] != sys.executable:
        env.pop("PYTHONPATH", None)  # it is for our interpreter, and would mix two environments
    server = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(*_: object) -> None:
        threading.Thread(target=_end_group, args=(server,), daemon=True).start()

    def watch_supervisor() -> None:
        os.read(0, 1)  # nothing is ever written: it returns when the supervisor is gone
        end()

    def watch_engine() -> None:
        if wait_for_engine_death(path, lambda: server.poll() is not None):
            end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch_engine, name="engine-watch", daemon=True).start()
    threading.Thread(target=watch_supervisor, name="parent-watch", daemon=True).start()
    code = server.wait()
    _kill_group(server)  # what it left behind holds memory, often a GPU's
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
