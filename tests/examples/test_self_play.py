"""The games of examples/self_play: their rules, their perfect player, their tasks."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from example_files import load_module

GAMES = {name: load_module("self_play", name) for name in ("nim", "guess", "positions")}


@pytest.fixture
def earned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a game of Nim emits; the policy always takes one stone."""
    rewards: list[Any] = []
    nim = GAMES["nim"]
    monkeypatch.setattr(nim, "emit_reward", lambda value, **more: rewards.append((value, more)))
    monkeypatch.setattr(nim, "ask", lambda side, pile: 1)
    return rewards


def test_the_winner_and_the_loser_earn_the_opposite(earned: list[Any]) -> None:
    GAMES["nim"].agent({"pile": 3})
    assert earned == [(1, {"agent": "white"}), (-1, {"agent": "black"})]


def test_only_a_player_without_mistakes_beats_the_perfect_one(
    earned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nim = GAMES["nim"]
    nim.agent({"pile": 6, "perfect": True})  # one stone leaves 5
    monkeypatch.setattr(nim, "ask", lambda side, pile: nim.best(pile))
    nim.agent({"pile": 6, "perfect": True})
    assert [bool(value) for value, _ in earned] == [False, True]
    for pile in (1, 2, 3, 5, 6, 7, 9):
        assert (pile - nim.best(pile)) % 4 == 0


def test_an_illegal_move_loses(earned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GAMES["nim"], "ask", lambda side, pile: None)
    GAMES["nim"].agent({"pile": 3})
    assert earned == [(-1, {"agent": "white"}), (1, {"agent": "black"})]


def test_the_generators_repeat_themselves() -> None:
    for name in ("piles", "secrets"):
        generator = getattr(GAMES["positions"], name)
        assert list(islice(generator(3), 50)) == list(islice(generator(3), 50))
        assert list(islice(generator(3), 50)) != list(islice(generator(4), 50))
