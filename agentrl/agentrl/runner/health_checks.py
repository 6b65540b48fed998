"""Check cheaply, and often, whether the gateway is well and whether the queue has changed."""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url

_GATEWAY_TIMEOUT_S = 5.0
_LONGEST_SILENCE_S = 1.0


class GatewayProbe:
    """Asks the gateway's ``/healthz`` whether it is well, and which boot of it answers."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host = parts.netloc
        self._path = f"{parts.path.rstrip('/')}/healthz"
        self._known: tuple[float, str | None] = (float("-inf"), None)

    def boot_id(self, max_age_s: float = 0.0) -> str | None:
        """Return the boot id of a healthy gateway; None when it is unreachable or unwell."""
        asked, boot_id = self._known
        if boot_id is None or time.monotonic() - asked > max_age_s:
            boot_id = self._ask()
            self._known = (time.monotonic(), boot_id)
        return boot_id

    def _ask(self) -> str | None:
        connection = self._connection(self._host, timeout=_GATEWAY_TIMEOUT_S)
        try:
            connection.request("GET", self._path)
            answer = connection.getresponse()
            body = answer.read()
            return _boot_id(json.loads(body)) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None
        finally:
            connection.close()


def _boot_id(health: dict[str, Any]) -> str:
    """Return the id of the gateway's boot and of its sampler's, which may restart alone."""
    return f"{health['boot_id']}-{health['recoveries']}"


class QueueWatch:
    """Tells when an idle worker should look at the queue again.

    A look costs a transaction. With SQLite one ``stat`` of the write-ahead log tells whether the
    store has changed: an idle worker looks at once when it has, and hardly ever when not. Where
    the store changes all the time, looks that find nothing become rarer.
    """

    TICK_S = 0.05
    _FIRST_S, _LONGEST_S = 0.02, 0.2

    def __init__(self, store_url: str) -> None:
        url = make_url(store_url)
        sqlite = url.database if url.get_backend_name() == "sqlite" else None
        self._files = [f"{sqlite}-wal", sqlite] if sqlite else []
        self._seen: object = None
        self._looked = float("-inf")
        self._pause = self._FIRST_S

    def due(self) -> bool:
        """Tell whether to look now; the caller is expected to look at once."""
        waited = time.monotonic() - self._looked
        stamp = self._stamp()
        if stamp is not None and stamp == self._seen:
            self._pause = self._FIRST_S
            # A write within the same tick of the file system's clock may leave no trace.
            if waited < _LONGEST_SILENCE_S:
                return False
        elif waited < self._pause:
            return False
        self._seen = stamp  # taken before the look: what is written meanwhile counts as new
        self._looked = time.monotonic()
        self._pause = min(self._pause * 1.5, self._LONGEST_S)
        return True

    def found(self) -> None:
        """Make the next look due at once, because the last one found a rollout."""
        self._looked = float("-inf")
        self._seen = None
        self._pause = self._FIRST_S

    def _stamp(self) -> object:
        for file in self._files:
            try:
                stat = os.stat(file)
            except OSError:  # no write-ahead log: everything is in the database itself
                continue
            return file, stat.st_mtime_ns, stat.st_size
        return None
