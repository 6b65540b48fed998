"""The base of every table of settings, and the types that their fields share."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from agentrl.config.secrets import check_store, check_url, check_variable
from agentrl_trainer.names import check_name

_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*(\.[^\W\d]\w*)*")


class Table(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


def from_json(value: Any) -> Any:
    """Read a table that a flag or a variable gives as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def from_names(value: Any) -> Any:
    """Read a list that a flag or a variable gives as ``asker,answerer`` or as JSON."""
    if isinstance(value, str) and value.strip()[:1] not in ("[", "{"):
        return [name.strip() for name in value.split(",") if name.strip()]
    return from_json(value)


def names_as_table(value: Any) -> Any:
    """Read a list of names as a table with an empty row for each."""
    value = from_names(value)
    if not isinstance(value, list):
        return value
    table = {str(name): {} for name in value}
    if len(table) < len(value):
        raise ValueError("a name is there twice")
    return table


def read_place(given: Any, name: str) -> Any:
    """Read ``ray:16``, in the setting ``name`` of a table, as 16 on Ray; ``ray`` alone keeps the
    default number."""
    if not isinstance(given, dict):
        return given
    place, _, count = str(given.get(name, "")).partition(":")
    if place != "ray":
        return given
    rest = {key: value for key, value in given.items() if key != name}
    return {**rest, f"{name}_on": "ray"} | ({name: count} if count else {})


def split_step(source: str | Path) -> tuple[Path, str]:
    """Split ``runs/NAME@STEP``; the step is empty where none is given."""
    path = Path(source)  # of which a folder above may have an @ in its name
    name, _, step = path.name.partition("@")
    return path.parent / name, step


def names_function(value: str) -> bool:
    """Tell whether a setting names a function: ``module:function`` or ``file.py:function``."""
    return _FUNCTION.fullmatch(value) is not None


def is_generator(spec: str) -> bool:
    """Tell whether ``agent.tasks`` names a function of Python, and not a data set and its split,
    which may look alike."""
    if not names_function(spec):
        return False
    module = spec.partition(":")[0]
    top = module.partition(".")[0]
    return module.endswith(".py") or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None


def choice_or_function(choices: Sequence[str], value: str) -> str:
    """Check that a setting is one of ``choices`` or names a function."""
    if value in choices or names_function(value):
        return value
    known = ", ".join(choices)
    raise ValueError(f"input should be one of {known}; or module:function, file.py:function")


def check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from error
    return value


Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(check_variable)
]
AdapterName = Annotated[str, AfterValidator(partial(check_name, dots=False))]
Names = Annotated[list[str], BeforeValidator(from_names)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
NonNegative = Annotated[Finite, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
HostName = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[\w.-]+|[0-9A-Fa-f:]+)$")]
HttpUrl = Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(check_url)]
Pattern = Annotated[str, AfterValidator(check_pattern)]
Store = Annotated[str, Field(min_length=1), AfterValidator(check_store)]
