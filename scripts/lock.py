"""Pin requirements/*.txt from pyproject.toml, with hashes. Run by ``make lock``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The Makefile installs torch and its CUDA packages; agentrl-middleware is this repository.
SKIP = re.compile(r"^(torch|triton|nvidia-\S+|cuda-\S+)==|^agentrl-middleware @|^#")
# The tests compare formulas with tinker-cookbook. It requires transformers <= 5.5.4, its only
# conflict with agentrl, and the functions that the tests call work with newer ones. The dev extra
# cannot express that; the lock overrides the requirement with agentrl's own range.
COOKBOOK = "tinker-cookbook[math-rl]==0.5.8\n"
OURS = "transformers>=5.13,<6\n"


def lock(name: str, extras: list[str], constraints: list[str], *more: str) -> None:
    """``more``: further arguments of ``uv pip compile``."""
    output = ROOT / "requirements" / name
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "-q", "--generate-hashes", "--upgrade"),
        *("--no-header", "--no-annotate", "--python", sys.executable, "--output-file", str(output)),
        *(f"--extra={extra}" for extra in extras),
        *(f"--constraint={constraint}" for constraint in constraints),
        *more,
        str(ROOT / "pyproject.toml"),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    blocks = re.split(r"\n(?=\S)", output.read_text())
    kept = [block.rstrip() for block in blocks if not SKIP.match(block)]
    output.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch, cookbook, ours = (Path(folder, name) for name in ("torch", "cookbook", "ours"))
        torch.write_text("torch==2.13.0\n")
        cookbook.write_text(COOKBOOK)
        ours.write_text(OURS)
        # dev first: the frameworks of the examples pin hard, and one environment holds it all.
        lock("dev.txt", ["dev"], [str(torch)], f"--override={ours}", str(cookbook))
        lock("runtime.txt", ["train", "hello"], [str(torch), "requirements/dev.txt"])
