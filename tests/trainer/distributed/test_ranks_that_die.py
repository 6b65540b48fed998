"""A rank that dies or has no memory is named, in a call or between calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psutil
import pytest
from fake_gateway import until
from ranked_rows import MODEL, TINY, groups, ranks_of

from agentrl_trainer.distributed import plan as plans
from agentrl_trainer.distributed.plan import RankError, RankPlan

FIRST: dict[str, Any] = {"adapters": ("a",), "rank": 4, "seed": 1}


def test_a_rank_that_dies_between_calls_is_named_and_one_without_memory_is() -> None:
    ranked = ranks_of(RankPlan(TINY, MODEL, 2), FIRST)
    rows = groups(1, 2, adapters=("a",))
    before = ranked.forward(rows)  # starts the follower
    ranked._followers.check()
    ranked._followers.running[0].process.kill()
    said = list[str]()

    def noticed() -> bool:
        try:
            ranked._followers.check()
        except RankError as error:
            said.append(str(error))
        return bool(said)

    until(noticed, 15)
    assert said[0].startswith("rank 1 of 2 ended: it was killed by signal 9")
    with pytest.raises(RankError, match="rank 1 of 2 ended: it was killed by signal 9"):
        ranked.forward(rows)

    assert ranked.forward(rows) == before  # with a new follower
    follower = psutil.Process(ranked._followers.running[0].process.pid)
    follower.rlimit(psutil.RLIMIT_AS, (follower.memory_info().vms,) * 2)
    with pytest.raises(RankError, match=r"rank 1 of 2 ended: .*(allocate memory|MemoryError)"):
        ranked.forward(groups(1, 16, adapters=("a",), prompt=2000))
    ranked.close()


def test_a_rank_that_dies_while_the_model_is_tried_is_named() -> None:
    plan = RankPlan(TINY, MODEL, 2, [("follower_setup:at_the_trial", ())], shard=True)
    with pytest.raises(RankError, match="rank 1 of 2 ended: it was killed by signal 9"):
        ranks_of(plan, FIRST)


def test_a_rank_that_dies_while_the_ranks_meet_fails_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its word that it is ready and the first collective."""
    monkeypatch.setattr(plans, "JOIN", timedelta(seconds=2))
    setup = [("follower_setup:at_the_meeting", ())]
    ranked = ranks_of(RankPlan(TINY, MODEL, 2, setup), FIRST)
    with pytest.raises(RankError, match="rank 1 of 2 ended: it was killed by signal 9"):
        ranked.forward(groups(1, adapters=("a",)))
    ranked.close()
