"""Which options of several trainers fit together. Imports no torch."""

from __future__ import annotations


def check_shards(*, shard: bool, load_in_4bit: bool) -> None:
    """Refuse a base model that cannot be spread over the trainers.

    Raises:
        ValueError: names the settings and the fix.
    """
    if shard and load_in_4bit:
        raise ValueError(
            "learning.shard_base: not with model.load_in_4bit, whose layers cannot be spread; "
            "leave one of them out"
        )
