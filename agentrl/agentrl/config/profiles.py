"""Find the settings for agents that ship: ``agentrl train codex`` reads the profile ``codex``.

A profile is a folder with ``profile.toml``, settings like those of ``--config``, in which
``{profile}`` is the folder's path.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import agentrl
from agentrl.config.setting_names import settings_of

_PACKAGE = Path(agentrl.__file__).parent
# In the wheel; in a clone.
_PLACES = (_PACKAGE / "coding_agents", _PACKAGE.parents[1] / "examples/coding_agents")


def profile_names() -> list[str]:
    files = [file for place in _PLACES for file in place.glob("*/profile.toml")]
    return sorted({file.parent.name for file in files})


def within(command: type[BaseModel], profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a profile that a command has: `agentrl eval` trains nothing."""
    known = {setting.name for setting in settings_of(command)}
    kept: dict[str, Any] = {}
    for table, values in profile.items():
        own = {k: v for k, v in values.items() if f"{table}.{k}" in known}
        kept |= {table: values} if table in known else {table: own} if own else {}
    return kept


def read_profile(name: str) -> dict[str, Any] | None:
    """Return the settings of a profile; None if there is none of this name."""
    if name not in profile_names():
        return None
    folder = next(one / name for one in _PLACES if (one / name / "profile.toml").is_file())
    text = (folder / "profile.toml").read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{profile}", str(folder)))
