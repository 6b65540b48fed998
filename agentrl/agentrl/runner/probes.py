"""What a worker asks before it claims a rollout: is the gateway well, may the queue hold one?"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

logger = logging.getLogger("agentrl.runner")

_GATEWAY_TIMEOUT_S = 5.0
_LONGEST_SILENCE_S = 1.0  # of an idle worker whose store has not changed


class GatewayProbe:
    """Asks the gateway's ``/healthz`` whether it is well, and which boot of it answers.

    Attributes:
        context_length: of the model, as the last answer said; None if it is not known.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/healthz"
        self._opener = build_opener(ProxyHandler({}))
        self._told = False
        self.context_length: int | None = None
        self._known: tuple[float, str | None] = (float("-inf"), None)

    def boot_id(self, max_age_s: float = 0.0) -> str | None:
        """Return the id of a healthy gateway's boot and of its sampler's, which may restart alone.

        Returns None when the gateway is unreachable or unwell.
        """
        asked, boot_id = self._known
        if boot_id is None or time.monotonic() - asked > max_age_s:
            try:
                with self._opener.open(self._url, timeout=_GATEWAY_TIMEOUT_S) as answer:
                    health = json.load(answer)
                boot_id = f"{health['boot_id']}-{health['recoveries']}"
                self.context_length = health.get("context_length")
            except HTTPError as refusal:
                boot_id = None
                if refusal.code == 403 and not self._told:  # such as for the name in its URL
                    self._told = True
                    logger.warning("%s: %s", self._url, refusal.read(1000).decode(errors="replace"))
            except (OSError, HTTPException, ValueError, KeyError, TypeError):
                boot_id = None
            self._known = (time.monotonic(), boot_id)
        return boot_id


class QueueWatch:
    """Tells when an idle worker should look at the queue again.

    A look costs a transaction. With SQLite one ``stat`` of the write-ahead log tells whether the
    store has changed: an idle worker looks at once when it has, and hardly ever when not. Where
    the store changes all the time, looks that find nothing become rarer.
    """

    _FIRST_S, _LONGEST_S = 0.02, 0.2
    _SHORTEST_TICK_S, _LONGEST_TICK_S = 0.05, 0.25

    def __init__(self, sqlite: str) -> None:
        """``sqlite``: the store's file; empty for a database server."""
        self._files = [f"{sqlite}-wal", sqlite] if sqlite else []
        self.found()

    def due(self) -> bool:
        """Tell whether to look now; the caller is expected to look at once."""
        now, stamp = time.monotonic(), self._stamp()
        # A write within the same tick of the file system's clock may leave no trace.
        unchanged = stamp is not None and stamp == self._seen
        if now - self._looked < (_LONGEST_SILENCE_S if unchanged else self._pause):
            return False
        if self._empty_since is None:
            self._empty_since = now
        # Taken before the look: what is written meanwhile counts as new.
        self._looked, self._seen = now, stamp
        self._pause = self._FIRST_S if unchanged else min(self._pause * 1.5, self._LONGEST_S)
        return True

    def found(self) -> None:
        """Make the next look due at once, because the last one found a rollout."""
        self._looked = float("-inf")
        self._seen: object = None
        self._pause = self._FIRST_S
        self._empty_since: float | None = None

    def tick_s(self) -> float:
        """Return for how long to sleep before the next ``due``.

        A twentieth of how long the queue has been empty: 32 idle workers that woke up 20 times a
        second took 0.13 of a core from the update.
        """
        empty_s = 0.0 if self._empty_since is None else time.monotonic() - self._empty_since
        return min(max(self._SHORTEST_TICK_S, empty_s / 20), self._LONGEST_TICK_S)

    def _stamp(self) -> object:
        for file in self._files:
            with contextlib.suppress(OSError):  # no log: everything is in the database itself
                stat = os.stat(file)
                return file, stat.st_mtime_ns, stat.st_size
        return None
