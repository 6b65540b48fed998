"""Notice a rank that has ended, or that lives and does nothing, as a stopped process does.

A follower counts up in the store of the process group, on a thread of its own. The first rank looks
at the counts, and kills a follower whose count stands still: what waits for that rank fails then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_BEAT_S = 1.0
LOOK_S, LOOKS = 3.0, 15
"""A follower is killed after so many looks at one count. Seconds alone would not do: the process
that looks may have been stopped itself."""


def _store(host: str, port: int) -> Any:
    """Connect to the process group's store anew: its own connection may be busy with a wait."""
    kind: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return kind(host, port, wait_for_workers=False)


def beat(host: str, port: int, rank: int) -> None:
    """Count up as long as the process of the first rank is there."""
    store = _store(host, port)

    def count() -> None:
        with contextlib.suppress(dist.DistError):
            while True:
                store.add(f"beats/{rank}", 1)
                time.sleep(_BEAT_S)

    threading.Thread(target=count, name="agentrl-beats", daemon=True).start()


class Watch:
    """Looks at the followers and their counts, on a thread, until it is ended."""

    ended: dict[int, str]
    """Why followers have ended, by rank, in the order in which that was seen."""

    def __init__(self, host: str, port: int, followers: Sequence[Any]) -> None:
        self.ended = {}
        self._over = threading.Event()
        self._store = _store(host, port)
        self._thread = threading.Thread(target=self._look, args=(list(followers),), daemon=True)
        self._thread.start()

    def end(self) -> dict[int, str]:
        """Stop to look; return why followers have ended."""
        self._over.set()
        self._thread.join()
        return self.ended

    def _look(self, followers: Sequence[Any]) -> None:
        counts, looks = [0] * len(followers), [0] * len(followers)
        while not self._over.wait(LOOK_S):
            for at, follower in enumerate(followers):
                if at + 1 in self.ended:
                    continue
                if (why := follower.why_ended(0)) is not None:
                    self.ended[at + 1] = why
                    continue
                before, counts[at] = counts[at], self._store.add(f"beats/{at + 1}", 0)
                looks[at] = looks[at] + 1 if counts[at] == before else 0
                if looks[at] == LOOKS:
                    self.ended[at + 1] = f"it gave no sign of life for {LOOKS * LOOK_S:.0f} s"
                    follower.kill()
