"""Read task files (JSON lines, one object a line), and count the steps that they make."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl_tracer.schemas import Json


def load_tasks(path: Path, field: str) -> list[Json]:
    """Return the tasks in a JSON-lines file.

    Raises:
        ConfigError: names ``field``, the file and the line that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {str(path)!r}: {error.strerror}") from error
    tasks: list[Json] = []
    for number, line in enumerate(lines, start=1):
        where = f"{field}: {path}, line {number} is"
        try:
            task = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} not JSON: {error.msg}") from error
        if isinstance(task, dict):
            tasks.append(task)
        elif line.strip():
            kind = type(task).__name__
            raise ConfigError(f'{where} a JSON {kind}; give an object, like {{"n": 1}}')
    if not tasks:
        raise ConfigError(f"{field}: {path} holds no tasks")
    return tasks


def steps_of(config: TrainConfig, tasks: Sequence[Json]) -> int:
    """Return the steps of the run: by default those of one epoch."""
    return config.run.steps or math.ceil(len(tasks) / config.rollouts.batch_size)
