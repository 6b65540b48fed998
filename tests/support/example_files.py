"""The modules and task files of an example. Several examples have an ``agent.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_module(example: str, name: str) -> ModuleType:
    path = EXAMPLES / example / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # where its dataclasses look for their types
    spec.loader.exec_module(loaded)
    return loaded


def read_tasks(example: str, name: str) -> list[dict[str, Any]]:
    lines = (EXAMPLES / example / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
