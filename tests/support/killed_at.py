"""``agentrl`` that kills itself with SIGKILL at a named moment, of the step that is to be killed.

    python killed_at.py MOMENT STEP train ...

The moments are those at which a crash could hurt: see ``MOMENTS``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from agentrl.cli.main import main as cli
from agentrl.training import loop as train
from agentrl.training import session
from agentrl_trainer import checkpoint


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: wrap(original, *a, **k))


def rollouts(step: int) -> None:
    """Some rollouts of the step are finished, others run, others wait."""

    def wait(original: Any, self: Any, look: Any, on_progress: Any) -> None:
        def progress(done: int, total: int) -> None:
            on_progress(done, total)
            if NOW["step"] == step and 0 < done < total:
                die()

        original(self, look, progress)

    around(session.Session, "wait", wait)


def optimizer(step: int) -> None:
    """One adapter has been updated in memory, the rest has not."""

    def update(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        if NOW["step"] == step:
            die()
        return result

    around(torch.optim.AdamW, "step", update)


def writing(step: int) -> None:
    """The tensors of the checkpoint are on the disk, its manifest is not."""

    def save(original: Any, tensors: Any, path: str) -> None:
        original(tensors, path)
        if NOW["step"] == step:
            die()

    around(checkpoint, "save_file", save)


def publishing(step: int) -> None:
    """The store knows the new version, the sampler does not."""

    def load(original: Any, self: Any, name: str, version: int, path: str) -> Any:
        if NOW["step"] == version == step:
            die()
        return original(self, name, version, path)

    around(session.GatewayHandle, "try_load_adapter", load)


def evaluating(step: int) -> None:
    """After the step: some of its evaluation is finished, the rest is not."""

    def execute(original: Any, self: Any, new: Any, on_progress: Any) -> Any:
        def progress(done: int, total: int) -> None:
            on_progress(done, total)
            if NOW["step"] == step and 0 < done < total:
                die()

        return original(self, new, progress)

    around(session.Session, "execute", execute)


NOW = {"step": 0}
MOMENTS = {
    moment.__name__: moment for moment in (rollouts, optimizer, writing, publishing, evaluating)
}


def main() -> None:
    moment, step, *arguments = sys.argv[1:]
    MOMENTS[moment](int(step))

    def begin(original: Any, run: Any, at: int) -> None:
        NOW["step"] = at
        original(run, at)

    around(train, "train_step", begin)
    sys.argv = ["agentrl", *arguments]
    cli()


if __name__ == "__main__":
    main()
