"""Experiment trackers behind one interface: TensorBoard, W&B, trackio, MLflow.

Each is an optional package, imported when it is opened. ``log`` takes the numbers of a step or an
evaluation and a table of rollouts, ``picture`` the learning curve as it is at a step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.config.setting_names import flattened
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json

_SAMPLES, _PICTURE = "samples", "learning_curve"
_PROJECT = "agentrl"
_MAY_HOLD_SECRETS: dict[str, Any] = {
    "run": {"store"},
    "models": True,
    "sampler": {"vllm": {"url"}},
    "gateway": {"forward_otlp"},
}
"""Settings with URLs or parameters that may hold passwords: no tracker gets them."""
_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow finds tables
_LONGEST = 6000  # characters of a parameter

Samples = Sequence[Mapping[str, str | float | None]]
"""Rows of a table; all have the same columns."""


def open_tracker(name: str, folder: RunFolder, config: TrainConfig, step: int | None) -> Tracker:
    """Open a tracker; ``step`` is the one that a resumed run continues after."""
    group, run_id = config.run.group, folder.run_id.read_text().strip()
    if name == "tensorboard":
        return _TensorBoard(folder.root / "tensorboard" / (group or ""), step)
    dump = partial(config.model_dump, mode="json", exclude=_MAY_HOLD_SECRETS)
    if name == "mlflow":  # which takes 100 parameters at most
        return _MLflow(folder.name, run_id, group, flattened(dump(exclude_defaults=True)))
    how: dict[str, Any] = {"project": _PROJECT, "group": group, "config": dump()}
    if name == "trackio":  # it resumes by name, and another run's folder may have the same one
        how |= {"name": f"{folder.name}-{run_id[-8:]}", "embed": False, "auto_log_cpu": False}
    else:
        how |= {"name": folder.name, "id": run_id, "dir": str(folder.root)}
        how["settings"] = {"console": "off"}  # the panel is drawn many times a second
    module = import_module(name)
    return _WandB(module, module.init(resume="allow", **how))


class _WandB:
    """A run of W&B, or of trackio, which has the same interface."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run

    def log(self, values: Mapping[str, float], step: int, samples: Samples) -> None:
        told: dict[str, Any] = dict(values)
        if samples:
            rows = [list(row.values()) for row in samples]
            told[_SAMPLES] = self._module.Table(columns=list(samples[0]), data=rows)
        self._run.log(told, step=step)

    def picture(self, path: Path, step: int) -> None:
        self._run.log({_PICTURE: self._module.Image(str(path))}, step=step)

    def close(self, *, killed: bool) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, folder: Path, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier files hold of this step and the ones after it.
        self._writer: Any = SummaryWriter(str(folder), purge_step=step)

    def log(self, values: Mapping[str, float], step: int, samples: Samples) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if samples:
            rows = [samples[0], *(row.values() for row in samples)]
            lines = [f"| {' | '.join(map(_plain, row))} |" for row in rows]
            lines.insert(1, "|---" * len(samples[0]) + "|")
            self._writer.add_text(_SAMPLES, "\n".join(lines), step)
        self._writer.flush()

    def picture(self, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self._writer.add_image(_PICTURE, imread(path), step, dataformats="HWC")

    def close(self, *, killed: bool) -> None:
        self._writer.close()


class _MLflow:
    """An experiment is the group, or ``agentrl``; the run's id is a tag, by which it is resumed."""

    def __init__(self, name: str, run_id: str, group: str | None, settings: Json) -> None:
        # By default a server that is away keeps the training waiting for many minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client, self._metric = mlflow.MlflowClient(), Metric
        experiment = mlflow.set_experiment(f"{_PROJECT}/{group}" if group else _PROJECT)
        place, tag = experiment.experiment_id, f"{_PROJECT}.run"
        if found := self._client.search_runs([place], f"tags.`{tag}` = '{run_id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(place, run_name=name, tags={tag: run_id}).info.run_id
        given = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
        self._client.log_batch(self._id, params=given)

    def log(self, values: Mapping[str, float], step: int, samples: Samples) -> None:
        now = int(time.time() * 1000)
        told = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=told)
        if samples:  # as its log_table writes them, which needs pandas
            rows = [list(row.values()) for row in samples]
            path = f"{_SAMPLES}/{step:06d}.json"
            self._client.log_dict(self._id, {"columns": list(samples[0]), "data": rows}, path)
            tags = self._client.get_run(self._id).data.tags
            tables = [*json.loads(tags.get(_TABLES, "[]")), {"path": path, "type": "table"}]
            self._client.set_tag(self._id, _TABLES, json.dumps(tables))

    def picture(self, path: Path, step: int) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, *, killed: bool) -> None:
        self._client.set_terminated(self._id, "KILLED" if killed else "FINISHED")


def _plain(value: str | float | None) -> str:
    """Return text that is neither Markdown nor HTML, whatever an agent has written into it."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else value
    plain = (one if one.isalnum() or one in " \n" else f"&#{ord(one)};" for one in str(text))
    return "".join(plain).replace("\n", "<br>")


Tracker = _TensorBoard | _WandB | _MLflow
