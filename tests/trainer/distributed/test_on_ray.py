"""Ranks on a Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranked_rows import ADAM, MODEL, TINY, distance, groups, ranks_of

pytest.importorskip("ray")

import ray  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from agentrl_trainer.distributed import on_ray
from agentrl_trainer.distributed.plan import RankError, RankPlan
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import load_base

# Of Ray's own.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
FIRST: dict[str, Any] = {"adapters": ("a", "b"), "rank": 8, "seed": 1}


@pytest.fixture(autouse=True)
def nodes() -> Iterator[None]:
    """One with a place for a trainer, where this process is, and one with two places."""
    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_a_base_is_whole_on_each_node_and_a_dead_rank_is_named() -> None:
    one = Learner(load_base(TINY, **MODEL), **FIRST)
    ranked: Any = ranks_of(RankPlan(TINY, MODEL, 4, shard=True, launch="ray"), FIRST)
    parts = {
        tuple(p.placements) for p in ranked.base.model.parameters() if hasattr(p, "placements")
    }
    assert {str(part) for part in parts} == {"(Replicate(), Shard(dim=0))"}
    for seed in range(3):
        for of in (one, ranked):
            of.forward_backward(groups(seed), "ppo")
            of.optim_step(ADAM)
    assert distance(one, ranked) < 1e-6
    actor = ranked._followers.running[1]._actor
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 2 of 4 ended: .*died"):
        ranked.forward(groups(4))


def test_new_actors_take_the_places_of_dead_ones() -> None:
    ranked: Any = ranks_of(RankPlan(TINY, MODEL, 4, launch="ray"), FIRST)
    for _ in range(2):
        before = ranked.forward(groups(4))
        ray.kill(ranked._followers.running[2]._actor)
        with pytest.raises(RankError, match=r"rank 3 of 4 ended: .*killed"):
            ranked.forward(groups(4))
    assert ranked.forward(groups(4)) == before
    ranked.close()


def test_what_an_actor_says_at_its_end_is_told() -> None:
    plan = RankPlan(TINY, MODEL, 2, [("nowhere:function", ())], launch="ray")
    with pytest.raises(RankError, match=r"rank 1 of 2 could not start: .*nowhere"):
        ranks_of(plan, FIRST).forward(groups(1))


def test_a_full_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_PLACE_S", 1)
    with pytest.raises(RankError, match="the Ray cluster has no place for 7 trainers, each"):
        ranks_of(RankPlan(TINY, MODEL, 8, shard=True, launch="ray"), FIRST)
