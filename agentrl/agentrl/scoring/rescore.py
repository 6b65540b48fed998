"""Reward recorded rollouts again, with functions of today: ``agentrl runs rescore``.

By default the new rewards count beside all others of a rollout, those that an earlier re-score had
set aside included. With ``alone`` only the new ones count; the others are kept, shown and found by
their names, and a later re-score brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from agentrl.gateway.on_demand import gateway_of, other_models
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import OpenRun
from agentrl.runs.recorded import open_store
from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.scorer import OnProgress, Scorer
from agentrl_tracer.schemas import Reward, Rollout, is_reward
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import rollout_rewards


@dataclass(frozen=True)
class Rescored:
    """What a re-score did."""

    rollouts: int
    """Those that matched."""
    rewards: list[Reward]
    """The new rewards. Rollouts without one keep what they have."""
    before: list[float]
    """Total rewards of the rollouts that had one."""
    after: list[float]


def rescore(
    run: OpenRun, functions: Sequence[RewardFunction], where: str, note: Callable[[str], object],
    on_progress: OnProgress, *, alone: bool = False,
) -> Rescored:  # fmt: skip
    """Compute and store rewards of a run's rollouts.

    A function that compares groups gets the members that match.

    Args:
        where: which rollouts; the index must be up to date.
        alone: only the new rewards count.

    Raises:
        ConfigError: a process uses the run, ``where`` is wrong, or a function cannot work here.
    """
    run.folder.lock()
    rows = find_rollouts(run.index, Query(where, limit=-1)).rows
    ids, own = [row["id"] for row in rows], tuple(function.keys for function in functions)
    with closing(open_store(run.folder)[0]) as store, ExitStack() as serving:
        rollouts = store.rollouts(run.id, ids=ids)
        before = _totals(store, rollouts)
        models = other_models(run.row["config"])
        context = ScoringContext(store, run.id, run.folder.root, note, models)
        if any(getattr(one.call, "asks_models", False) for one in functions):
            url, plan = serving.enter_context(gateway_of(run.folder, store, run.id))
            context = replace(
                context, gateway=url, operator_key=plan.operator_key,
                own_models=[*plan.base_names, *plan.adapters],
            )  # fmt: skip
        scorer = Scorer(functions, context, again=True, alone=alone)
        try:
            scorer.score(rollouts, on_progress)
        finally:
            scorer.close()
            run.index.take_again(ids)
        new = [r for r in store.rewards(ids) if r.key.startswith(own) and is_reward(r.value)]
        return Rescored(len(ids), new, before, _totals(store, rollouts))


def _totals(store: Store, rollouts: Sequence[Rollout]) -> list[float]:
    earned = rollout_rewards(rollouts, store.rewards([one.id for one in rollouts])).values()
    return [reward for reward in earned if reward is not None]
