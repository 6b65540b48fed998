"""What a call's row says about the versions that sampled it."""

from __future__ import annotations

import pytest

from agentrl_proxy.requests.recording import Sampled
from agentrl_proxy.sampler import TokenEvent


@pytest.mark.parametrize(
    ("versions", "stretches", "oldest"),
    [
        ([], [], None),
        ([3, 3], [(0, 3)], 3),
        ([3, 3, 4, 5, 5], [(0, 3), (2, 4), (3, 5)], 3),
        ([4, 3], [(0, 4), (1, 3)], 3),  # an adapter taken back, as a resumed run does
        ([None, 1], [(0, None), (1, 1)], None),
    ],
)
def test_each_stretch_of_an_answer_has_its_version(
    versions: list[int | None], stretches: list[tuple[int, int | None]], oldest: int | None
) -> None:
    sampled = Sampled()
    for token, version in enumerate(versions):
        sampled.add(TokenEvent(0, token, -1.0, adapter_version=version), tops=False)
    assert sampled.versions == stretches
    assert sampled.version == oldest
