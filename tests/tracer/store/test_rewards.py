"""Rewards of functions, computed after a rollout: replaced by name, set aside, and found again."""

from __future__ import annotations

import pytest

from agentrl_tracer.schemas import Reward
from agentrl_tracer.store import Store


def _scored(function: str, value: float, name: str = "", attempt: str = "a") -> Reward:
    name = name or function
    return Reward(attempt, f"rollout-{attempt}", name, value, f"scored:{function}:{name}")


def _kept(store: Store) -> dict[str, float]:
    return {one.key: one.value for one in store.rewards(["rollout-a"])}


def test_a_function_replaces_its_own_scores_and_no_others(store: Store) -> None:
    store.set_scores(["a"], ["long", "longer"], [_scored("long", 1), _scored("longer", 2)])
    other = _scored("long", 5, attempt="b")
    store.set_scores(["b"], ["long"], [other])

    store.set_scores(["a"], ["long"], [_scored("long", 3, "chars")])

    assert _kept(store) == {"scored:long:chars": 3, "scored:longer:longer": 2}
    assert [one.value for one in store.rewards(["rollout-b"])] == [5]
    # A function that gives nothing any more leaves nothing behind.
    store.set_scores(["a"], ["long"], [])
    assert _kept(store) == {"scored:longer:longer": 2}


def test_scores_alone_set_the_others_aside_and_later_ones_bring_them_back(store: Store) -> None:
    store.set_scores(["a"], ["old"], [_scored("old", 1)])
    store.set_scores(["a"], ["new"], [_scored("new", 2)], alone=True)
    assert _kept(store) == {"aside:scored:old:old": 1, "scored:new:new": 2}

    store.set_scores(["a"], ["new"], [_scored("new", 3)], alone=True)
    assert _kept(store) == {"aside:scored:old:old": 1, "scored:new:new": 3}
    # One that was set aside is replaced, too.
    store.set_scores(["a"], ["old"], [_scored("old", 4)], alone=True)
    assert _kept(store) == {"aside:scored:new:new": 3, "scored:old:old": 4}

    store.set_scores(["a"], ["more"], [_scored("more", 5)])
    assert _kept(store) == {"scored:new:new": 3, "scored:old:old": 4, "scored:more:more": 5}


@pytest.mark.parametrize("name", ["under_score", "100%"])
def test_names_of_functions_are_no_patterns(store: Store, name: str) -> None:
    alike = name.replace("_", "x").replace("%", "0")
    store.set_scores(["a"], [alike], [_scored(alike, 1)])
    store.set_scores(["a"], [name], [_scored(name, 2)])
