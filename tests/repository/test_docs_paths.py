"""Every path of this repository that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PATH = re.compile(
    r"`((?:agentrl|proxy|tracer|trainer|scripts|tests|examples|benchmarks)/[\w./*-]+)`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    missing = [p for p in PATH.findall(page.read_text(encoding="utf-8")) if not list(ROOT.glob(p))]
    assert not missing


def test_the_architecture_follows_four_journeys() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    journeys = re.split(r"^## The journey of a ", text, flags=re.M)[1:]
    assert [journey.split("\n")[0] for journey in journeys] == [
        "request",
        "reward",
        "group",
        "setting",
    ]
    assert all(len(PATH.findall(journey)) >= 4 for journey in journeys)
