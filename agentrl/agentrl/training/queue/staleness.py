"""Bound the age of the tokens that a step trains on: ``max_staleness`` and ``stale`` act here.

Age is counted in adapter versions, of which each step publishes one: a token sampled by version v
and trained in step s has age s - 1 - v. A synchronous run trains on tokens of age 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StalenessLimit:
    """How far rollouts may run ahead of updates, and what happens to groups that come late.

    Groups of at most ``max_staleness`` further steps are queued beside those of the current step
    (AReaL's admission rule, arXiv:2505.24298, section 5.1: at version i, at most i + K + 1 batches
    have been started; also ``max_steps_off_policy`` of tinker-cookbook's AsyncConfig, and the lag
    of PipelineRL, arXiv:2509.19128).

    Attributes:
        max_staleness: the bound K, in versions; 0 is synchronous.
        stale: ``wait`` keeps a step waiting for a group that would be older than K one step later,
            which costs no more than a synchronous run; ``drop`` skips older calls; ``correct``
            trains on them with importance weights.
    """

    max_staleness: int = 0
    stale: Literal["wait", "drop", "correct"] = "wait"

    def may_leave(self, step: int, versions: Sequence[int], batch_size: int) -> bool:
        """Tell whether later steps can train on groups left behind in ``step`` before they expire.

        Groups are taken in queue order, hence oldest first, so no other choice would do better.

        Args:
            versions: of the adapters, when each group left behind was queued.
            batch_size: groups that each step takes.
        """
        if self.stale != "wait":
            return True
        slack = [version + 1 + self.max_staleness - step for version in versions]
        return all(
            sum(one <= later for one in slack) <= later * batch_size
            for later in range(self.max_staleness + 1)
        )

    def oldest_version(self, step: int) -> int | None:
        """Return the oldest version whose tokens ``step`` trains on; None without such a bound."""
        return step - 1 - self.max_staleness if self.stale == "drop" else None

    def metrics(self, ages: Sequence[int]) -> dict[str, float]:
        """Summarize the ages of a step's trained tokens."""
        count = max(len(ages), 1)
        return {
            "staleness/mean": sum(ages) / count,
            "staleness/max": max(ages, default=0),
            "staleness/share": sum(age > 0 for age in ages) / count,
            "staleness/beyond": sum(age > self.max_staleness for age in ages) / count,
        }
