from __future__ import annotations

from agentrl_tracer.schemas import new_id


def test_ids_are_distinct_and_sort_by_their_moment() -> None:
    ids = [new_id("call-") for _ in range(2_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {29}
