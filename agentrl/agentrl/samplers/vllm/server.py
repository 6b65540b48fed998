"""Start a vLLM server that ends with us.

Knows vLLM's command line, not its HTTP API. vLLM pins torch, so it may live in its own environment;
what runs there is vLLM's own entry point.

Run as a module, this is the process between supervisor and server: it ends the server, and every
process that the server started, when it is told to, when the supervisor is gone, when the server's
engine has died, or when it is killed itself.
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentrl.capacity import available_cores, sampler_threads
from agentrl.config.commands import ModelCommand, TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.secrets import secret_variables
from agentrl.process_privacy import environment_without
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
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_SLEEP = "--enable-sleep-mode"
_START_TIMEOUT_S = 1800.0  # it loads, compiles and warms up
_POLL_S = 0.1
_END_GRACE_S = 8.0
"""Less than the supervisor's."""
_MAX_LORAS = 4
"""Adapters in one batch: the current version, and older ones that still answer requests."""


class VllmServer(SupervisedProcess):
    """A supervised vLLM server on a socket that only this user can reach."""

    def __init__(
        self, command: Sequence[str], log: Path, withheld: Sequence[str] = (), *,
        name: str = "vLLM", gpus: str = "", threads: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            command: as ``vllm_command`` returns it.
            withheld: variables it does not get.
            name: for log messages.
            gpus: its CUDA_VISIBLE_DEVICES; empty: all.
            threads: on a CPU, unless VLLM_CPU_OMP_THREADS_BIND says otherwise; 0: vLLM's own
                choice, which binds them to cores.
        """
        # In the temporary folder, because a socket's path must be short.
        self._folder = Path(tempfile.gettempdir()) / f"agentrl-vllm-{secrets.token_hex(6)}"
        self._socket = str(self._folder / "socket")
        self.url = f"unix:{self._socket}"
        leash = [sys.executable, "-m", "agentrl.samplers.vllm.server"]
        # By default vLLM wants nearly all memory of a CPU, and fails if it is used.
        env = {"VLLM_CPU_KVCACHE_SPACE": "4", **environment_without(withheld), **_ENVIRONMENT}
        if threads and _BIND not in env:
            env |= {_BIND: "nobind", "OMP_NUM_THREADS": str(threads)}
        env |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        if _SLEEP in command:  # /sleep and /wake_up, for who reaches the socket
            env |= {"VLLM_SERVER_DEV_MODE": "1"}
        super().__init__(name, [*leash, *command, "--uds", self._socket], log, env)

    def start(self) -> None:
        self._folder.mkdir(mode=0o700)
        self.spawn().supervise()

    def wait(self, tell: Callable[[str], object]) -> None:
        """Return when the server accepts connections; ``tell`` receives notices until then.

        Raises:
            RuntimeError: it keeps dying, or takes too long; with the end of its log.
        """
        waiting, log_tail = Waiting(tell), self.log_tail
        while not self._listens():
            if self.restarts >= 2 or waiting.seconds > _START_TIMEOUT_S:
                raise RuntimeError(f"vLLM does not start; the end of {self.log}:\n{log_tail()}")
            waiting.still(lambda: f"vLLM is starting ({waiting.seconds:.0f} s) {log_tail(1)}")
            time.sleep(_POLL_S)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self._socket) == 0

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def planned_servers(
    config: ModelCommand, log: Path, *, max_rank: int | None, adapters: Iterable[Path] = ()
) -> list[VllmServer]:
    """Return the servers that the settings want started, not started yet.

    Args:
        log: of the first; the others' names have a number, too.
        max_rank: of the adapters that will be loaded; None: of ``adapters``, PEFT folders.

    Raises:
        ConfigError: as ``vllm_command``.
        ModelError: a trainer's device that this machine does not have.
    """
    if config.sampler.kind != "vllm" or config.sampler.vllm.url:
        return []
    if isinstance(config, TrainConfig):  # else only vLLM's torch needs the device
        from agentrl_trainer.models.devices import choose_device

        choose_device(config.model.device)
    if max_rank is None:
        max_rank = max(map(adapter_rank, adapters), default=_RANKS[0])
    from agentrl.samplers.vllm.gpus import gpus_of_servers

    command, withheld = vllm_command(config, max_rank), secret_variables(config)
    count = _started(config)
    logs = [log, *(log.with_stem(f"{log.stem}-{number}") for number in range(1, count))]
    names = ["vLLM"] if count == 1 else [f"vLLM {number}" for number in range(count)]
    return [
        VllmServer(command, log, withheld, name=name, gpus=gpus, threads=_cpu_threads(config))
        for name, log, gpus in zip(names, logs, gpus_of_servers(count), strict=True)
    ]


def _started(config: ModelCommand) -> int:
    return config.sampler.samplers if isinstance(config, TrainConfig) else 1


def _cpu_threads(config: ModelCommand) -> int:
    """Return the threads of each server on a CPU where others compute at the same time, else 0.

    By itself, vLLM binds the threads of each server to the same cores.
    """
    servers = _started(config)
    trains = isinstance(config, TrainConfig) and config.rollouts.max_staleness > 0
    if servers == 1 and not trains:
        return 0
    from agentrl_trainer.models.devices import choose_device

    if choose_device(config.model.device).type != "cpu":
        return 0
    cores = max(1, (config.model.cores or available_cores()) // servers)
    return sampler_threads(cores, sys.maxsize, alone=not trains)  # as embedded samplers share


def vllm_command(config: ModelCommand, max_rank: int) -> list[str]:
    """Return the command of a server with these settings, without its socket.

    Raises:
        ConfigError: the interpreter has no vLLM, or the rank is beyond vLLM's.
    """
    python = str(config.sampler.vllm.python or sys.executable)
    finds = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    if subprocess.run([python, "-c", finds], check=False, capture_output=True).returncode:
        raise ConfigError(
            f"sampler.vllm.python: {python!r} has no vLLM. Install it there, or name the "
            "interpreter of an environment that has it (its own is best: vLLM pins torch)"
        )
    rank = next((r for r in _RANKS if r >= max_rank), None)
    if rank is None:
        raise ConfigError(
            f"learning.rank: vLLM serves adapters up to rank {_RANKS[-1]}, not {max_rank}"
        )
    import torch

    from agentrl.samplers.vllm.gpus import memory_share
    from agentrl_trainer.models.devices import default_device
    from agentrl_trainer.models.loading import checkpoint_dtype
    from agentrl_trainer.models.sources import resolve_model

    own, trust = config.model, config.model.trust_remote_code
    model = resolve_model(own.name)
    chosen = default_device() if own.device == "auto" else torch.device(own.device)
    device, dtype, vllm = chosen.type, own.dtype, config.sampler.vllm
    if dtype == "auto":  # as the trainer loads the model; vLLM's own would halve float32
        stored = "float32" if device == "cpu" else checkpoint_dtype(model, trust_remote_code=trust)
        dtype = str(stored).removeprefix("torch.")
    # Compiling takes minutes on a CPU, which vLLM uses on a Mac too.
    eager = ["--enforce-eager"] if device in ("cpu", "mps") else []
    count = _started(config)
    share = memory_share(config, chosen, count) if device == "cuda" else 0.5
    loras = _MAX_LORAS * -(-config.gateway_count // count)  # each gateway loads its own
    # Adapters are loaded into all engines of one API server.
    engines = ["--data-parallel-size", str(vllm.engines), "--api-server-count", "1"]
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model),
        *("--dtype", dtype),
        *("--generation-config", "vllm"),  # ignore the model's own top_k and the like
        *("--logprobs-mode", "raw_logprobs"),
        *("--structured-outputs-config", '{"backend": "guidance"}'),
        *("--gpu-memory-utilization", str(share)),
        *(engines if vllm.engines > 1 else []),
        *([_SLEEP] if vllm.sleep else []),
        "--enable-lora",
        *("--max-lora-rank", str(rank)),
        *("--max-loras", str(loras)),
        *(["--enable-mixed-moe-lora-format"] if _has_experts(model, trust) else []),
        *eager,
        *(["--trust-remote-code"] if trust else []),
        *shlex.split(vllm.args),  # the last one of a flag counts
    ]


def _has_experts(model: str, trust: bool) -> bool:
    from transformers import AutoConfig

    from agentrl_trainer.models.moe import expert_count

    try:
        return expert_count(AutoConfig.from_pretrained(model, trust_remote_code=trust)) > 0
    except (OSError, ValueError):  # vLLM reports a missing model better
        return False


def main(argv: Sequence[str]) -> int:
    """Run the server until it ends or has to; return its exit code, 128 + n for signal n."""
    path = argv[argv.index("--uds") + 1]
    Path(path).unlink(missing_ok=True)  # left by a server that was killed
    env = dict(os.environ)
    if argv[0] != sys.executable:
        env.pop("PYTHONPATH", None)  # it is our interpreter's, and would mix two environments
    server = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    # Kills the server's process group when its standard input closes: then we were killed.
    guard = subprocess.Popen(
        ["sh", "-c", f"cat; kill -9 -{server.pid}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end_server() -> None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_GRACE_S)
        server.kill()

    def watch_supervisor() -> None:
        os.read(0, 1)  # the supervisor never writes: this returns when it is gone
        end_server()

    def watch_guard() -> None:
        guard.wait()
        end_server()

    def watch_engine() -> None:
        if wait_for_engine_death(path, lambda: server.poll() is not None):
            end_server()

    def begin(what: Callable[[], None]) -> None:
        threading.Thread(target=what, daemon=True).start()

    signal.signal(signal.SIGTERM, lambda *_: begin(end_server))
    begin(watch_engine)
    begin(watch_guard)
    begin(watch_supervisor)
    with guard:
        code = server.wait()
        # Processes that it left behind hold memory, often a GPU's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
