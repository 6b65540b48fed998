"""The loop of an offline training: updates, held-out measures, checkpoints, until it has converged.

The order of the examples depends on the seed and the epoch alone, and whether the run ends early on
the held-out losses in its metrics. So a run that is resumed at a checkpoint makes the same steps
again, bit for bit. A step is logged before its checkpoint; what was logged after the newest
checkpoint is dropped by a resumed run.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from agentrl.config.commands import OfflineConfig
from agentrl.config.errors import ConfigError
from agentrl.console.offline import OfflineDisplay
from agentrl.datasets.samples import Example
from agentrl.offline.objectives import measure, update
from agentrl.process_privacy import private_files
from agentrl.runs.best_adapter import held_out_losses_of, keep_best, lowest_loss
from agentrl.runs.folder import RunFolder
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.runs.metric_names import HELD_OUT_LOSS, LOSS
from agentrl.training.metrics import finite_numbers
from agentrl.training.resume import tell_other_counts
from agentrl.training.session import RunError
from agentrl.training.setup.clients import TrainingClients
from agentrl_tracer.store import Store
from agentrl_trainer.checkpoint import latest_checkpoint
from agentrl_trainer.client import AdamParams
from agentrl_trainer.learner.optimizers import schedule_factor


@dataclass(frozen=True, slots=True)
class OfflineSummary:
    """How a run ended, as ``summary.json`` says it."""

    steps: int
    loss: list[float]
    """Of the steps' own examples, before each update."""
    held_out: dict[int, float]
    """Held-out losses by step."""
    best: int | None
    """The step with the lowest held-out loss, of equal ones the earliest."""
    seconds: float
    """Of updates and measures, those before a --resume included."""
    why: str | None
    """Why it ended before its last step."""


@dataclass
class OfflineRun:
    """A run, fresh or resumed, whose base model is loaded.

    Args:
        backend: of one client, ``config.model.adapter``.
        run_id: of the run in its store.
    """

    config: OfflineConfig
    examples: Sequence[Example]
    held_out: Sequence[Example]
    folder: RunFolder
    store: Store
    run_id: str
    backend: TrainingClients
    display: OfflineDisplay

    def __post_init__(self) -> None:
        self.name = self.config.model.adapter
        self.client = self.backend.clients[self.name]

    @property
    def per_epoch(self) -> int:
        return steps_of_epoch(self.config, self.examples)

    @property
    def steps(self) -> int:
        return self.per_epoch * self.config.learning.epochs

    @cached_property
    def held_out_losses(self) -> dict[int, float]:
        return held_out_losses_of(self.folder)

    @property
    def best(self) -> int | None:
        return lowest_loss(self.held_out_losses)

    def batch(self, step: int) -> list[Example]:
        """Return the examples of a step, counted from 1."""
        epoch, at = divmod(step - 1, self.per_epoch)
        order = _order(len(self.examples), f"{self.config.run.seed}/{epoch}")
        size = self.config.learning.batch_size
        return [self.examples[i] for i in order[at * size : (at + 1) * size]]

    def why_end(self) -> str | None:
        """Say why the run ends before its last step; None if it goes on."""
        patience, known, best = self.config.evaluation.patience, self.held_out_losses, self.best
        if patience is None or best is None or sum(step > best for step in known) < patience:
            return None
        return (
            f"evaluation.patience: {patience} measures in a row were no better than the held-out "
            f"loss {known[best]:.4f} of step {best}"
        )

    # ---- metrics, adapters and checkpoints

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self.folder.append_metrics(row)
        self.store.log_metrics(self.run_id, step, finite_numbers(row))

    def save_version(self, step: int) -> None:
        path = self.folder.adapter_version(self.name, step)
        self.client.save_weights_for_sampler(path).result()

    def prune(self, keep: int) -> None:
        """Delete all adapters but the newest, the best, and the best as of each checkpoint."""
        known = self.held_out_losses
        names = (path.name.removeprefix("step-") for path in self.folder.checkpoints.glob("step-*"))
        ends = [*(int(name) for name in names if name.isdigit()), max(known)]
        bests = (lowest_loss({s: x for s, x in known.items() if s <= end}) for end in ends)
        self.folder.prune_adapters(keep, [step for step in bests if step is not None])

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(self.examples, self.held_out)

    def restore(self) -> int:
        """Go back to the newest whole checkpoint, drop what came after it, and return its step."""
        found = self.backend.service.restore_checkpoint(self.folder.checkpoints).result()
        for path, fault in found.torn.items():
            self.display.note(f"checkpoint {path.name} was passed over: {fault}")
        step = 0
        if found.checkpoint is not None:
            step, meta = found.checkpoint.step, found.checkpoint.meta
            tell_other_counts(step, meta, self.config, self.display.note)
        self.folder.drop_metrics_after(step)
        self.store.drop_metrics_after(self.run_id, step)
        for path in (self.folder.adapters / self.name).glob("v*"):
            if path.name[1:].isdigit() and int(path.name[1:]) > step:
                shutil.rmtree(path)
        keep_best(self.folder, [self.name], self.best)
        return step


def steps_of_epoch(config: OfflineConfig, examples: Sequence[Example]) -> int:
    """Return the optimizer steps of a pass over the examples; the last one may be of fewer."""
    return math.ceil(len(examples) / config.learning.batch_size)


def digest_of(examples: Sequence[Example], held_out: Sequence[Example]) -> str:
    """Return a digest of the examples: their order says what a step trains on."""
    digest = hashlib.blake2b(digest_size=16)
    for example in (*examples, None, *held_out):
        digest.update(repr(example).encode())
    return digest.hexdigest()


def check_examples(
    folder: RunFolder, examples: Sequence[Example], held_out: Sequence[Example]
) -> None:
    """Check that a run that goes on has its own examples.

    Raises:
        ConfigError: its newest checkpoint was made on others.
    """
    newest = latest_checkpoint(folder.checkpoints).checkpoint
    if newest is not None and newest.meta["examples"] != digest_of(examples, held_out):
        raise ConfigError(
            f"resume: {folder.root} was trained on other examples than those that the "
            "settings give now; bring the same files back, or start a new run"
        )


@lru_cache(maxsize=1)
def _order(count: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(count), count)


@private_files()
def train_offline(run: OfflineRun) -> OfflineSummary:
    """Train to the end.

    Raises:
        RunError: a loss or gradient was not finite in the first step.
    """
    step = run.restore()
    run.display.begin(run.steps, step)
    measure_if_due(run, step)
    while step < run.steps and run.why_end() is None:
        step += 1
        train_step(run, step)
        measure_if_due(run, step)
    return finish(run, step)


def train_step(run: OfflineRun, step: int) -> None:
    """Update the adapter on the next examples, and write a checkpoint if it is due."""
    began = time.perf_counter()
    learning = run.config.learning
    rate = run.backend.peak_learning_rate * schedule_factor(
        learning.schedule, step, run.steps, learning.warmup_steps
    )
    adam = AdamParams(rate, grad_clip_norm=learning.max_grad_norm)
    row: dict[str, Any] = {"step": step, "epoch": (step - 1) // run.per_epoch + 1}
    row |= update(run.config, run.client, run.batch(step), adam)
    row["learning_rate"] = rate
    if row.get("skipped_non_finite"):
        if step == 1:
            raise RunError(
                "the loss or gradient of the first step is not finite: give model.dtype float32, "
                "or look at the weights of the examples"
            )
        run.display.note(f"step {step} was not applied: its loss or gradient was not finite")
    row["seconds/update"] = time.perf_counter() - began
    run.log(step, row)
    how = run.config.run
    if step % how.checkpoint_every == 0 or step == run.steps:
        cores = run.config.model.cores
        meta = {"run_id": run.run_id, "examples": run.fingerprint, "cores": cores}
        run.backend.service.save_checkpoint(
            run.folder.checkpoints, step, meta=meta, keep=how.keep_checkpoints
        ).result()
    run.display.step(row)


def measure_if_due(run: OfflineRun, step: int) -> None:
    """Measure the held-out examples, save the adapter, and keep the best one."""
    due = step % run.config.evaluation.every == 0 or step == run.steps
    if not run.held_out or not due or step in run.held_out_losses:
        return
    began = time.perf_counter()
    run.save_version(step)
    found = measure(run.config, run.client, run.held_out)
    row: dict[str, Any] = {f"eval/{name}": value for name, value in found.items()}
    run.log(step, {"step": step, **row, "seconds/evaluation": time.perf_counter() - began})
    loss = row[HELD_OUT_LOSS]
    run.held_out_losses[step] = loss if math.isfinite(loss) else math.inf
    if run.best == step:
        keep_best(run.folder, [run.name], step)
    if run.config.run.keep_adapters is not None:
        run.prune(run.config.run.keep_adapters)
    run.display.measured(step, loss, run.best or 0)


def finish(run: OfflineRun, step: int) -> OfflineSummary:
    """Write the final adapter, the picture and ``summary.json``."""
    folder, why = run.folder, run.why_end() if step < run.steps else None
    run.save_version(step)
    shutil.rmtree(folder.adapter, ignore_errors=True)
    shutil.copytree(folder.adapter_version(run.name, step), folder.adapter)
    rows = folder.read_metrics()
    title = f"{folder.name}: {run.config.kind} of {run.config.model.name}"
    losses = ((LOSS, "loss of the step's examples"), (HELD_OUT_LOSS, "held-out loss"))
    draw_learning_curve(rows, title, folder.picture, *losses)
    loss = [row[LOSS] for row in rows if row.get(LOSS) is not None]  # those that were finite
    took = [row.get(f"seconds/{what}", 0.0) for row in rows for what in ("update", "evaluation")]
    seconds = round(sum(took), 2)
    summary = OfflineSummary(step, loss, run.held_out_losses, run.best, seconds, why)
    folder.write_json(folder.summary, asdict(summary))
    run.store.end_run(run.run_id, "finished")
    run.backend.close()
    return summary
