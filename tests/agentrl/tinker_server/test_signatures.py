"""Our clients take every call of the SDK's, but for the differences listed in docs/client.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker

from agentrl_trainer.client import SamplingClient, ServiceClient, TrainingClient
from agentrl_trainer.client.parameters import TINKER_ONLY

DOCS = Path(__file__).parents[3] / "docs" / "client.md"
OURS = {kind.__name__: kind for kind in (ServiceClient, TrainingClient, SamplingClient)}
MADE_BY_OTHERS = {"TrainingClient.__init__", "SamplingClient.__init__"}


def table(section: str) -> set[str]:
    """The code in the first cells of a table of docs/client.md."""
    text = DOCS.read_text(encoding="utf-8").split(f"### {section}\n")[1].split("\n##")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    found = {n: f for n, f in inspect.getmembers(kind, callable) if not n.startswith("_")}
    return {"__init__": kind.__init__, **found}


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    known = inspect.signature(inspect.unwrap(function)).parameters
    return {name: p for name, p in known.items() if p.kind is not p.VAR_KEYWORD}


def differences(theirs: Any, mine: Any, by_keyword: set[str]) -> set[str]:
    """Their parameters that mine do not take, and mine that they do not have but must be given.

    A call by keyword must mean the same; one by position must mean the same or fail.
    """
    theirs, mine = parameters(theirs), parameters(mine)
    ours = [name for name, p in mine.items() if p.kind is not p.KEYWORD_ONLY]
    odd: set[str] = set()
    for place, (name, p) in enumerate(theirs.items()):
        own = mine.get(name)
        other_place = p.kind is not p.KEYWORD_ONLY and place < len(ours) and ours[place] != name
        if own is None and name not in by_keyword:
            odd.add(name)
        if other_place or (own and p.default is not p.empty and own.default != p.default):
            odd.add(name)
    return odd | {n for n, p in mine.items() if p.default is p.empty and n not in theirs}


@pytest.mark.tinker
def test_every_parameter_of_the_sdk_is_taken() -> None:
    absent, odd, compared = set(), set(), 0
    for name, ours in OURS.items():
        for method, function in methods(getattr(tinker, name)).items():
            full = f"{name}.{method}"
            if full in MADE_BY_OTHERS:
                continue
            if not hasattr(ours, method):
                absent.add(full)
                continue
            known = name if method == "__init__" else method.removesuffix("_async")
            by_keyword = set(TINKER_ONLY.get(known, ()))
            odd |= {
                f"{full}({p})" for p in differences(function, getattr(ours, method), by_keyword)
            }
            compared += 1
    assert absent == table("Absent methods")
    assert odd == set()
    assert compared > 40


def test_the_page_lists_the_tinker_only_parameters() -> None:
    listed = table("Tinker-only parameters") - {"save_weights_and_get_sampling_client"}
    assert listed == {name for known in TINKER_ONLY.values() for name in known}
