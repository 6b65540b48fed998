"""Name the built-in models and kinds of weights, and check names that become files or folders.

Such names are those of runs, adapters, clients and saved states.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, TypeAlias

SamplerWeights: TypeAlias = Literal["model", "bfloat16", "int8"]
"""Weights that the embedded sampler computes with: the model's own, or rounded ones, on a CPU."""

TINY_MODEL, SMOLLM2 = BUILT_IN = ("agentrl-tiny", "smollm2-135m")

_LONGEST = 100  # a file system's limit is 255, of which staging folders need some
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_VERSION = 1
"""Of the converted folder; another number makes it anew."""


def cache_folder() -> Path:
    """Return the user's folder of what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentrl"


def smollm2_folder() -> Path:
    """Return where the files of ``smollm2-135m`` are, once they are made."""
    return cache_folder() / f"{SMOLLM2}-{_VERSION}"


def check_name(name: object, field: str | None = None, *, dots: bool = True) -> str:
    """Return a name that stays in its folder, whatever that is.

    Args:
        field: begins the error; None where the caller names the field and the value.

    Raises:
        ValueError: says what a name may be.
    """
    fits = isinstance(name, str) and len(name) <= _LONGEST and _NAME.fullmatch(name)
    if isinstance(name, str) and fits and (dots or "." not in name):
        return name
    inside = "'-' and, not last, '.'" if dots else "'-'"
    said = (
        f"a name has 1 to {_LONGEST} of the letters A to Z and a to z, digits, '_' and, not first, "
        f"{inside}"
    )
    raise ValueError(f"{field}: got {name!r}, but {said}" if field else said)
