"""``agentrl`` that sends itself a signal at a named moment, of the step that is to be killed.

    python killed_at.py MOMENT STEP SIGNAL train ...

The moments are those at which a crash could hurt: see ``MOMENTS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from agentrl.__main__ import main as cli
from agentrl.training import loop, session
from agentrl_trainer import checkpoint

NOW = {"step": 0, "killed": 0, "signal": 0}


def die_at(step: int) -> None:
    if step == NOW["killed"]:
        NOW["killed"] = -1  # once: threads go on while the main thread ends in order
        os.kill(os.getpid(), NOW["signal"])


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: wrap(original, *a, **k))


def midway(original: Any, self: Any, what: Any, on_progress: Any) -> Any:
    def progress(done: int, total: int) -> None:
        on_progress(done, total)
        if 0 < done < total:
            die_at(NOW["step"])

    return original(self, what, progress)


def afterwards(original: Any, *args: Any, **named: Any) -> Any:
    result = original(*args, **named)
    die_at(NOW["step"])
    return result


def before_loading(original: Any, self: Any, name: str, version: int, path: str) -> Any:
    if NOW["step"] == version:
        die_at(version)
    return original(self, name, version, path)


MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    # Some rollouts of the step are finished, others run, others wait.
    "rollouts": (session.Session, "wait", midway),
    # One adapter has been updated in memory, the rest has not.
    "optimizer": (torch.optim.AdamW, "step", afterwards),
    # The tensors of the checkpoint are on the disk, its manifest is not.
    "writing": (checkpoint, "save_file", afterwards),
    # The store knows the new version, the sampler does not.
    "publishing": (session.Gateways, "try_load_adapter", before_loading),
    # After the step: some of its evaluation is finished, the rest is not.
    "evaluating": (session.Session, "execute", midway),
}


def main() -> None:
    moment, step, number, *arguments = sys.argv[1:]
    NOW["killed"], NOW["signal"] = int(step), int(number)
    around(*MOMENTS[moment])

    def begin(original: Any, run: Any, at: int) -> None:
        NOW["step"] = at
        original(run, at)

    around(loop.Trainer, "train_step", begin)
    sys.argv = ["agentrl", *arguments]
    cli()


if __name__ == "__main__":
    main()
