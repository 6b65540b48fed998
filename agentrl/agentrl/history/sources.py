"""Find runs below a folder and in PostgreSQL stores, and open their stores read-only.

A folder's other ``*.db`` files, and the PostgreSQL stores, hold calls without a run: those that
``agentrl serve`` recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError, store_url, without_password
from agentrl.history.index import RolloutIndex
from agentrl.history.served import ServedIndex
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError
from agentrl_tracer.store.faults import PATIENCE_S

_PATIENCE_S = 2.0  # for a database that is away: a page must answer
_MOST_OPEN = 16


@dataclass(frozen=True)
class OpenRun:
    """A run, its store, and its index. ``row`` is the run's row as of the opening.

    A run of a PostgreSQL store whose folder is elsewhere is named ``NAME~ID``. ``folder`` is then
    one in the cache, with its configuration and no more; it does not ``exists()`` as a run's.
    """

    folder: RunFolder
    store: Store
    row: Json
    index: RolloutIndex

    @property
    def id(self) -> str:
        return self.row["id"]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> str:
        return f"/runs/{quote(self.name, safe='')}"

    def current(self) -> Json:
        """Return the run's row as it is now: ``state`` by ``state_of``, ``name`` of its folder."""
        row = self.store.run(self.id) or self.row
        return row | {"name": self.name, "state": state_of(self.folder, row)}

    def close(self) -> None:
        self.index.close()
        if self.folder.exists():  # else other runs share it
            self.store.close()


@dataclass(frozen=True)
class OpenServed:
    """A store's calls without a run."""

    name: str
    store: Store
    index: ServedIndex
    id: None = None

    @property
    def path(self) -> str:
        return f"/served/{quote(self.name, safe='')}"

    def current(self) -> Json:
        return {"state": "running"}

    def close(self) -> None:
        self.index.close()
        if not self.store.is_remote:
            self.store.close()


Opened = TypeVar("Opened", OpenRun, OpenServed)


def open_run(folder: RunFolder, patience_s: float = PATIENCE_S) -> OpenRun:
    """Open a run read-only; raises what ``Sources.open`` raises."""
    store, row = open_store(folder, patience_s, read_only=True)
    return OpenRun(folder, store, row, RolloutIndex(folder.root / "view.db"))


class Sources:
    """The runs below a folder and in PostgreSQL stores. Thread-safe; those used last stay open.

    Args:
        stores: URLs of PostgreSQL stores; ``os.environ/NAME`` stands for a password.
    """

    def __init__(self, root: Path, stores: Sequence[str] = ()) -> None:
        self.root = root
        self._urls = {_store_name(url): url for url in stores}
        self._lock = threading.RLock()
        self._shared: dict[str, Store] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._served: OrderedDict[str, OpenServed] = OrderedDict()

    def names(self) -> list[str]:
        """Return the names of the folders that hold a run, in order."""
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.root)):
                with contextlib.suppress(OSError):
                    if RunFolder(self.root / name).exists():
                        found.append(name)
        return found

    def in_stores(self) -> tuple[dict[str, Json], list[str]]:
        """Return the rows of the runs whose folder is elsewhere by name, and the stores' faults."""
        here = {RunFolder(self.root / name).run_id.read_text().strip() for name in self.names()}
        found: dict[str, Json] = {}
        faults: list[str] = []
        for store_name in self._urls:
            try:
                rows = self._store(store_name).runs()
                found |= {
                    f"{row['name']}~{row['id']}": row for row in rows if row["id"] not in here
                }
            except (StoreError, MissingSecretError) as error:
                faults.append(f"{store_name}: {error}")
        return found, faults

    def open(self, name: str) -> OpenRun:
        """Open a run by the name of its folder, or as ``NAME~ID``.

        Raises:
            ConfigError: there is no such run, or its store is not there.
            StoreError: the store is away.
            MissingSecretError: its password is not in the environment.
        """
        with self._lock:
            if known := self._known(self._open, name):
                return known
            _check_name(name, "run")
            if "~" not in name or (opened := self._find(name)) is None:
                opened = open_run(RunFolder.existing(self.root / name, "run"), _PATIENCE_S)
            return self._keep(self._open, name, opened)

    def all(self) -> tuple[list[OpenRun], list[str]]:
        """Return every run, newest first, and a sentence for each that cannot be opened."""
        runs: list[OpenRun] = []
        elsewhere, faults = self.in_stores()
        for name in [*self.names(), *elsewhere]:
            try:
                runs.append(self.open(name))
            except (StoreError, ConfigError, MissingSecretError, OSError) as error:
                faults.append(f"{name}: {error}")
        return sorted(runs, key=lambda run: -run.row["created_at"]), faults

    def served_names(self) -> list[str]:
        """Return the stores beside the runs: files ``*.db`` of the folder, and PostgreSQL's."""
        files = sorted(path for path in self.root.glob("*.db") if _is_store(path))
        return [*(path.name for path in files), *self._urls]

    def served(self, name: str) -> OpenServed:
        """Open a store of ``served_names``; raises what ``open`` raises."""
        with self._lock:
            if known := self._known(self._served, name):
                return known
            _check_name(name, "store")
            if name in self._urls:
                store, place = self._store(name), cache_folder(without_password(self._urls[name]))
            elif _is_store(path := self.root / name):
                store, place = _open_read_only(str(path)), cache_folder(str(path.absolute()))
            else:
                raise ConfigError(f"store: {name!r} is no store of agentrl in {self.root}")
            opened = OpenServed(name, store, ServedIndex(place / "served.db"))
            return self._keep(self._served, name, opened)

    def close(self) -> None:
        with self._lock:
            for opened in (*self._open.values(), *self._served.values(), *self._shared.values()):
                opened.close()
            for known in (self._open, self._served, self._shared):
                known.clear()

    def _known(self, opened: OrderedDict[str, Opened], name: str) -> Opened | None:
        if name in opened:
            opened.move_to_end(name)
        return opened.get(name)

    def _keep(self, opened: OrderedDict[str, Opened], name: str, new: Opened) -> Opened:
        opened[name] = new
        if len(opened) > _MOST_OPEN:
            opened.popitem(last=False)[1].close()
        return new

    def _store(self, name: str) -> Store:
        """Return the one connection pool of a PostgreSQL store."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = _open_read_only(store_url(self._urls[name]))
            return self._shared[name]

    def _find(self, name: str) -> OpenRun | None:
        """Find a run whose folder is elsewhere; its configuration comes from its store."""
        for store_name, url in self._urls.items():
            store = self._store(store_name)
            if row := store.run(name.rpartition("~")[2]):
                folder = RunFolder(cache_folder(without_password(url)) / name)
                folder.root.mkdir(mode=0o700, exist_ok=True)
                folder.write_json(folder.config, row["config"])
                return OpenRun(folder, store, row, RolloutIndex(folder.root / "view.db"))
        return None


def cache_folder(shown: str) -> Path:
    """Return this user's folder for what the window keeps of a folder or a store."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "agentrl" / "window" / hashlib.sha256(shown.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _open_read_only(url: str) -> Store:
    Store(url, patience_s=_PATIENCE_S).close()  # brings an older schema up to date
    return Store(url, patience_s=_PATIENCE_S, read_only=True)


def _check_name(name: str, kind: str) -> None:
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ConfigError(f"{kind}: {name!r} is no name of a {kind}")


def _store_name(url: str) -> str:
    """Return the name of a PostgreSQL store in paths of pages: host and database."""
    parsed = urlsplit(url)
    return f"postgresql-{parsed.hostname or 'local'}-{parsed.path.strip('/') or 'default'}"


def _is_store(path: Path) -> bool:
    """Whether a file is a store of agentrl; another program's database is left alone."""
    tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('alembic_version', 'calls')"
    url = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(url, uri=True)) as db:
            return db.execute(tables).fetchone()[0] == 2
    except sqlite3.Error:
        return False
