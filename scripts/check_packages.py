"""Install the built wheel with each extra in a fresh environment and import what the extra serves.

    python scripts/check_packages.py [EXTRA ...]

Each environment is made by pip from the package index, torch first where the extra needs it.
Prints one line per extra; exits 1 when one fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"  # the build that the Makefile installs
# Extra -> whether it needs torch, and what must import afterwards.
EXTRAS = {
    "": (False, "agentrl, agentrl_tracer.emit"),
    "store": (False, "agentrl_tracer.store"),
    "proxy": (False, "agentrl_proxy.app"),
    "train": (True, "agentrl.training.loop, agentrl.gateway.process"),
    "tracing": (False, "agentrl_tracer.instrumentation.registry"),
    "tinker": (True, "tinker, agentrl.samplers.tinker"),
    "postgres": (False, "psycopg, agentrl_tracer.store"),
    "4bit": (True, "bitsandbytes, accelerate"),
    "ray": (False, "ray"),
    "tensorboard": (False, "tensorboard"),
    "wandb": (False, "wandb"),
    "trackio": (False, "trackio"),
    "mlflow": (False, "mlflow"),
    "sweep": (False, "optuna"),
    "hello": (False, "openai"),
    "examples": (False, "crewai, langchain, langchain_openai, agents"),
    "dev": (True, "pytest, agentrl.training.loop"),
}


def build_wheel(folder: Path) -> Path:
    """Build this repository's wheel into ``folder``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def check(wheel: Path, extra: str) -> str:
    """Install ``wheel[extra]`` in a fresh environment; return what failed, or an empty string."""
    needs_torch, modules = EXTRAS[extra]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, upgrade_deps=True)
        python = f"{folder}/bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        steps = [[*pip, TORCH]] if needs_torch else []
        steps += [
            [*pip, wanted],
            [python, "-m", "pip", "check"],
            [python, "-c", f"import {modules}"],
        ]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False, cwd=folder)
            if done.returncode:
                return (done.stdout + done.stderr).strip()[-2000:]
    return ""


def main() -> None:
    unknown = set(sys.argv[1:]) - set(EXTRAS)
    if unknown:
        sys.exit(f"no such extra: {', '.join(sorted(unknown))}; there are {', '.join(EXTRAS)}")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        for extra in sys.argv[1:] or EXTRAS:
            started = time.monotonic()
            error = check(wheel, extra)
            failed |= bool(error)
            took = time.monotonic() - started
            print(
                f"{extra or '(base)':12} {'FAILED' if error else 'ok':7} {took:5.0f} s", flush=True
            )
            if error:
                print(error, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
