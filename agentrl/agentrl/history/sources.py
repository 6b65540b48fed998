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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import MissingSecretError, store_url, without_password
from agentrl.history.index import Index
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store, StoreError
from agentrl_tracer.store.faults import PATIENCE_S
from agentrl_trainer import names

_LONGEST_NAME = 255  # bytes, of a file
_PATIENCE_S = 2.0  # for a database that is away: a page must answer
_MOST_OPEN = 16
T = TypeVar("T")


@dataclass(frozen=True)
class OpenRun:
    """A run, its store, and its index; with ``id`` None, a store's calls without a run.

    A run of a PostgreSQL store whose folder is elsewhere is named ``NAME~ID``. Its ``folder``, and
    that of calls without a run, is one in the cache; it does not ``exists()`` as a run's.
    """

    folder: RunFolder
    store: Store
    row: Json
    """The run's, as of the opening."""
    index: Index

    @property
    def id(self) -> Any:
        return self.row["id"]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> str:
        """Of its pages."""
        return f"/{'served' if self.id is None else 'runs'}/{quote(self.name, safe='')}"

    def current(self) -> Json:
        """Return the run's row as it is now: ``state`` by ``state_of``, ``name`` of its folder."""
        row = self.store.run(self.id) or self.row
        return row | {"name": self.name, "path": self.path, "state": state_of(self.folder, row)}

    def fill(self) -> bool:
        """Bring the index further up to date; False if there was nothing new."""
        return self.index.fill()

    def close(self) -> None:
        self.index.close()
        self.store.close()


def open_run(folder: RunFolder, patience_s: float = PATIENCE_S) -> OpenRun:
    """Open a run read-only; raises what ``Sources.open`` raises."""
    store, row = open_store(folder, patience_s, read_only=True)
    return _indexed(folder, store, row)


class Sources:
    """The runs below a folder and in PostgreSQL stores. Thread-safe; those used last stay open.

    Args:
        stores: URLs of PostgreSQL stores; ``os.environ/NAME`` stands for a password.
    """

    def __init__(self, root: Path, stores: Sequence[str] = ()) -> None:
        self.root = root
        self._urls = {_store_name(url): url for url in stores}
        self._lock = threading.RLock()
        self._remote: dict[str, Store] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()

    def names(self) -> list[str]:
        """Return the names of the folders that hold a run, in order."""
        found = (path.parent for path in self.root.glob("*/run_id"))
        return sorted(folder.name for folder in found if RunFolder(folder).exists())

    def each(self, look: Callable[[str, Json | None], T]) -> tuple[list[T], list[str]]:
        """Return what ``look`` makes of every run, and a sentence for each where it cannot.

        Args:
            look: takes the name and, of a run whose folder is elsewhere, its row.
        """
        runs: dict[str, Json | None] = dict.fromkeys(self.names())
        here = {RunFolder(self.root / name).run_id.read_text().strip() for name in runs}
        found: list[T] = []
        faults: list[str] = []
        for name in self._urls:
            with _noted(faults, name):
                rows = [row for row in self._store(name).runs() if row["id"] not in here]
                runs |= {f"{row['name']}~{row['id']}": row for row in rows}
        for name, row in runs.items():
            with _noted(faults, name):
                found.append(look(name, row))
        return found, faults

    def all(self) -> tuple[list[OpenRun], list[str]]:
        """Return every run, newest first, and a sentence for each that cannot be opened."""
        runs, faults = self.each(lambda name, _: self.open(name))
        return sorted(runs, key=lambda run: -run.row["created_at"]), faults

    def open(self, name: str) -> OpenRun:
        """Open a run by the name of its folder, or as ``NAME~ID``.

        Raises:
            ConfigError: there is no such run, or its store is not there.
            StoreError: the store is away.
            MissingSecretError: its password is not in the environment.
        """

        def opened() -> OpenRun:
            folder = self.root / _checked(name, "run")
            return self._elsewhere(name) or open_run(RunFolder.existing(folder, "run"), _PATIENCE_S)

        return self._once(f"run {name}", opened)

    def served_names(self) -> list[str]:
        """Return the stores beside the runs: files ``*.db`` of the folder, and PostgreSQL's."""
        files = sorted(path for path in self.root.glob("*.db") if _is_store(path))
        return [*(path.name for path in files), *self._urls]

    def served(self, name: str) -> OpenRun:
        """Open a store of ``served_names``; raises what ``open`` raises."""

        def opened() -> OpenRun:
            path = self.root / _checked(name, "store")
            if name in self._urls:
                store, cache = self._store(name), cache_folder(without_password(self._urls[name]))
            elif _is_store(path):
                store, cache = _read_only(str(path)), cache_folder(str(path.absolute()))
            else:
                raise ConfigError(f"store: {name!r} is no store of agentrl in {self.root}")
            row = {"id": None, "name": name, "kind": "serve", "state": "served", "config": {}}
            return _indexed(RunFolder(cache / name), store, row)

        return self._once(f"store {name}", opened)

    def close(self) -> None:
        with self._lock:
            for opened in (*self._open.values(), *self._remote.values()):
                opened.close()
            self._open.clear()
            self._remote.clear()

    def _once(self, key: str, open_: Callable[[], OpenRun]) -> OpenRun:
        with self._lock:
            if key in self._open and not _is_still_there(self._open[key]):
                self._open.pop(key).close()
            opened = self._open[key] = self._open.get(key) or open_()
            self._open.move_to_end(key)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return opened

    def _store(self, name: str) -> Store:
        """Return the one connection pool of a PostgreSQL store; once closed it opens again."""
        with self._lock:
            if name not in self._remote:
                self._remote[name] = _read_only(store_url(self._urls[name]))
            return self._remote[name]

    def _elsewhere(self, name: str) -> OpenRun | None:
        """Find a run whose folder is elsewhere; its configuration comes from its store."""
        for store_name, url in self._urls.items() if "~" in name else ():
            store = self._store(store_name)
            if row := store.run(name.rpartition("~")[2]):
                run = _indexed(RunFolder(cache_folder(without_password(url)) / name), store, row)
                run.folder.write_json(run.folder.config, row["config"])
                return run
        return None


def cache_folder(shown: str) -> Path:
    """Return this user's folder for what the window keeps of a folder or a store."""
    folder = names.cache_folder() / "window" / hashlib.sha256(shown.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _noted(faults: list[str], name: str) -> Iterator[None]:
    """Add what is wrong with a run or store to ``faults``."""
    try:
        yield
    except (StoreError, ConfigError, MissingSecretError, OSError) as error:
        faults.append(f"{name}: {error}")


def _indexed(folder: RunFolder, store: Store, row: Json) -> OpenRun:
    folder.root.mkdir(mode=0o700, exist_ok=True)  # one in the cache
    return OpenRun(folder, store, row, Index(folder.root / "view.db", store, row["id"]))


def _is_still_there(run: OpenRun) -> bool:
    """Whether the folder is the run's yet: it may have been deleted and made again for another."""
    written = run.folder.run_id
    return not written.is_file() or written.read_text().strip() == run.id


def _read_only(url: str) -> Store:
    return Store(url, patience_s=_PATIENCE_S, read_only=True)


def _checked(name: str, kind: str) -> str:
    too_long = len(os.fsencode(name)) > _LONGEST_NAME
    if name != os.path.basename(name) or name in ("", ".", "..") or too_long:
        raise ConfigError(f"{kind}: {name!r:.80} is no name of a {kind}")
    return name


def _store_name(url: str) -> str:
    """Return the name of a PostgreSQL store in paths of pages: host and database."""
    parsed = urlsplit(url)
    return f"postgresql-{parsed.hostname or 'local'}-{parsed.path.strip('/') or 'default'}"


def _is_store(path: Path) -> bool:
    """Whether a file is a store of agentrl; another program's database is left alone."""
    tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('alembic_version', 'calls')"
    try:
        url = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(url, uri=True)) as db:
            return db.execute(tables).fetchone()[0] == 2
    except sqlite3.Error:
        return False
