"""Pins requirements/*.txt from pyproject.toml, with hashes. Run by ``make lock``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The Makefile installs torch itself, with what belongs to its build; agentrl is this repository.
SKIP = re.compile(r"^(torch|triton|nvidia-\S+|cuda-\S+)==|^agentrl @|^#")


def lock(name: str, extras: list[str], constraints: list[str]) -> None:
    output = ROOT / "requirements" / name
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "-q", "--generate-hashes", "--upgrade"),
        *("--no-header", "--no-annotate", "--python", sys.executable, "--output-file", str(output)),
        *(f"--extra={extra}" for extra in extras),
        *(f"--constraint={constraint}" for constraint in constraints),
        str(ROOT / "pyproject.toml"),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    blocks = re.split(r"\n(?=\S)", output.read_text())
    kept = [block.rstrip() for block in blocks if not SKIP.match(block)]
    output.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    torch = ROOT / "requirements" / "torch.constraint"
    torch.write_text("torch==2.13.0\n")
    # dev first: the frameworks of the examples pin hard, and one environment holds it all.
    lock("dev.txt", ["dev"], [str(torch)])
    lock("runtime.txt", ["train", "hello"], [str(torch), "requirements/dev.txt"])
    torch.unlink()
