"""Where a run keeps its things on disk, and where adapters are found."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError, no_run_folder
from agentrl.config.field_types import split_step
from agentrl.process_privacy import open_private
from agentrl_trainer.models.saved_lora import is_reward_model

if TYPE_CHECKING:
    from agentrl.config.commands import ModelCommand
    from agentrl.config.settings.run import Readers

logger = logging.getLogger("agentrl")

_POINTER = "tinker.json"  # as agentrl_trainer.client.tinker has it, which would import torch
_ATTEMPT_LOG = re.compile(r"[0-9a-f]{24}-\d+\.log|shared-\d+\.log")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunFolder:
    """``runs/NAME``: configuration, store, adapters, checkpoints, logs, metrics and the picture."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.name = self.root.name
        self.config = self.root / "config.json"
        self.run_id = self.root / "run_id"
        self.started_in = self.root / "started_in"  # the working directory
        self.store = self.root / "store.db"
        self.adapters = self.root / "adapters"
        self.adapter = self.root / "adapter"  # the final one
        self.best_adapter = self.root / "adapter-best"  # by held-out accuracy or loss
        self.initial = self.root / "initial"  # copies of what it started from, if not fresh
        self.spent = self.root / "spent.json"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.tokens = self.root / "tokens"  # what the trainer saw of each, see token_records
        self.metrics = self.root / "metrics.jsonl"
        self.picture = self.root / "learning_curve.png"
        self.summary = self.root / "summary.json"
        self.pruned = self.root / "pruned"  # a sweep has ended this run early
        self._locked = False
        self._close: Callable[[], object] = lambda: None

    @classmethod
    def create(cls, runs: Path, name: str | None, prefix: str) -> RunFolder:
        """Make a new folder; by default its name is ``prefix`` and the time.

        Raises:
            ConfigError: the name is taken.
            RuntimeError: nothing can be written there.
        """
        if name is None:
            stamp = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
            names = [stamp, *(f"{stamp}-{i}" for i in range(2, 100))]
            name = next(one for one in names if not (runs / one).exists())
        folder = cls(runs / name)
        if folder.config.exists():
            raise ConfigError(
                f"name: {str(folder.root)!r} exists already; give another name, "
                f"or go on with --resume {runs / name}"
            )
        try:
            runs.mkdir(parents=True, exist_ok=True)
            for path in (folder.root, folder.logs):
                path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _unwritable(error) from error
        return folder

    @classmethod
    def existing(cls, path: Path, field: str) -> RunFolder:
        """Return the folder of a run that was begun; ``field`` is the setting's name, for errors.

        Raises:
            ConfigError: there is none.
        """
        folder = cls(path)
        if not folder.exists():
            raise ConfigError(f"{field}: {no_run_folder(path)}")
        return folder

    def exists(self) -> bool:
        """Tell whether a run was begun here."""
        return self.config.is_file() and self.run_id.is_file()

    def lock(self) -> None:
        """Let no other process write here until this one ends or this object is gone.

        The lock is ``flock`` on a file, which ``kill -9`` releases too. Forked children share it: a
        gateway would hold it on after a killed trainer. So they close theirs at once.

        Raises:
            ConfigError: another process has the lock; names it.
            RuntimeError: nothing can be written here.
        """
        if self._locked:
            return
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)  # earlier versions let others read
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.root / "lock", flags, 0o600)
            self._close = weakref.finalize(self, os.close, descriptor)
            os.register_at_fork(after_in_child=self._close)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = (self.root / "lock").read_text(errors="replace").strip()
            raise ConfigError(
                f"{self.root} is in use: {holder or 'another process'} is running it. Let it "
                "finish, or end it first, then --resume it"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _unwritable(error) from error
            logger.warning("%s: this file system has no locks: %s", self.root, error.strerror)
        self._locked = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within the block; raises as ``lock``."""
        self.lock()
        try:
            yield
        finally:
            self._close()
            self._locked = False

    def is_in_use(self) -> bool | None:
        """Tell whether a process holds the lock; None where this machine cannot tell."""
        try:
            with (self.root / "lock").open() as file:
                if not file.read().rstrip().endswith(f" on {socket.gethostname()}"):
                    return None
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def read_config(self) -> dict[str, Any]:
        """Return the settings of the run.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.config} is damaged; bring a copy back: {error}") from error

    def adapter_version(self, name: str, version: int) -> Path:
        """Return a path of its own for each version: vLLM's prefix cache is keyed by path."""
        return self.adapters / name / f"v{version:06d}"

    def layout(self, place: Path, names: Sequence[str]) -> dict[str, Path]:
        """Return where adapters are in ``adapter`` or ``adapter-best``: several in folders."""
        return {name: place if len(names) == 1 else place / name for name in names}

    def share_adapter(self, adapter: Path, readers: Readers) -> None:
        """Let others than this user read an adapter, and pass through the folders to it."""
        if readers == "owner":
            return
        more = 0o055 if readers == "everyone" else 0o050
        for folder in (adapter, adapter.parent, self.adapters):
            folder.chmod(0o700 | more)
        for file in adapter.iterdir():
            file.chmod(0o600 | more & 0o044)
        self.root.chmod(0o700 | more & 0o011)

    def write(self, path: Path, content: str | bytes) -> None:
        """Write a file as a whole: a reader never sees half of it."""
        temporary = path.with_suffix(path.suffix + ".tmp")
        temporary.unlink(missing_ok=True)
        with open_private(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)

    def prune_adapters(self, keep: int, evaluated: Collection[int]) -> None:
        """Delete versions that neither the ``keep`` newest nor anything else needs.

        What was evaluated, what a checkpoint goes on from, and what holds a file ``keep`` stays.
        """
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        needed = {int(name) for name in names if name.isdigit()}.union(evaluated)
        for adapter in self.adapters.glob("*"):
            for version, path in versions_of(adapter)[:-keep]:
                if version not in needed and not (path / "keep").exists():
                    shutil.rmtree(path, ignore_errors=True)

    def prune_logs(self, keep: int, unfinished: Collection[str]) -> None:
        """Delete the logs of attempts but the ``keep`` newest and those of unfinished rollouts."""
        logs: list[tuple[float, str]] = []
        for file in os.scandir(self.logs):
            if _ATTEMPT_LOG.fullmatch(file.name) and file.name[:24] not in unfinished:
                with contextlib.suppress(FileNotFoundError):  # empty: its worker deleted it
                    logs.append((file.stat().st_mtime, file.path))
        for _, path in sorted(logs)[:-keep]:
            Path(path).unlink(missing_ok=True)

    def write_json(self, path: Path, value: Any) -> None:
        self.write(path, json.dumps(strict(value), indent=2, default=str, allow_nan=False) + "\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        with open_private(self.metrics) as file:
            file.write(_line(values).encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows; a number that was not finite is None."""
        return read_rows(self.metrics)

    def drop_metrics_after(self, step: int) -> None:
        """Drop the rows that a run that is resumed after ``step`` will make again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        self.write(self.metrics, "".join(map(_line, kept)))


def _unwritable(error: OSError) -> RuntimeError:  # no fault of the settings
    return RuntimeError(
        f"runs: cannot write {error.filename or 'there'}: {error.strerror}; this user must find "
        "room and be allowed to write there, or name another folder with --runs"
    )


def strict(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(strict(row), allow_nan=False) + "\n"


# ---- adapters


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON in a file, but those that a kill has cut off."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(strict(json.loads(line)))  # earlier versions wrote NaN
    return rows


def run_and_step(source: str | Path) -> tuple[RunFolder, str]:
    """Return the run of ``runs/NAME@STEP``, and the step; empty where none is given."""
    root, step = split_step(source)
    return RunFolder(root), step


def find_adapters(source: str | Path, field: str) -> dict[str, Path]:
    """Return the PEFT folders that ``source`` means, by the names that they have there.

    Args:
        source: a run folder (its newest adapters), ``RUN@STEP``, ``RUN@best``, a PEFT folder, or a
            folder of such folders, one for each adapter.
        field: the setting's name, for errors.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = Path(source)
    run, step = run_and_step(source)
    if (path / "adapter_config.json").is_file():
        found = {path.name: path}
    elif run.config.is_file():
        found = _adapters_of(run, step, field)
    else:
        found = {file.parent.name: file.parent for file in path.glob("*/adapter_config.json")}
    for folder in (path, *found.values()):
        if fetched := how_to_fetch(folder):
            raise ConfigError(
                f"{field}: {str(source)!r} is on Tinker; fetch it, and give the folder that it "
                f"writes: {fetched[0]}"
            )
    if not found:
        raise ConfigError(
            f"{field}: {str(source)!r} is no run folder, and no PEFT folder: it has no "
            "adapter_config.json, nor has a folder in it"
        )
    for folder in found.values():
        _refuse_damaged(folder, field)
    return found


def adapter_folders(config: ModelCommand, source: str | Path | None) -> dict[str, Path]:
    """Return the PEFT folders of ``adapter_path``, by the names that the configuration gives them.

    Raises:
        ConfigError: there is none, or one that ``config`` names is missing.
    """
    if source is None:
        return {}
    found = find_adapters(source, "adapter_path")
    if any(map(is_reward_model, found.values())):
        raise ConfigError(
            f"adapter_path: {str(source)!r} is a reward model, which writes no answers; give it to "
            f"a training: agentrl train AGENT --rewards model:{source}"
        )
    names = list(config.adapters) or ([config.model.adapter] if len(found) == 1 else sorted(found))
    return named_adapters(source, found, names, "adapter_path")


def named_adapters(
    source: str | Path, found: Mapping[str, Path], names: Sequence[str], field: str
) -> dict[str, Path]:
    """Return the folders of the adapters ``names``; a single one may have had any name.

    Raises:
        ConfigError: one is missing; ``field`` is the setting's name.
    """
    if len(found) == len(names) == 1:
        return {names[0]: next(iter(found.values())).absolute()}
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"{field}: {str(source)!r} has no adapter {', '.join(missing)}; it has "
            f"{', '.join(sorted(found))}"
        )
    return {name: found[name].absolute() for name in names}


def versions_of(adapter: Path) -> list[tuple[int, Path]]:
    """Return an adapter's versions, oldest first; folders of other names are the user's."""
    found = [path for path in adapter.glob("v*") if path.name[1:].isdigit()]
    return sorted((int(path.name[1:]), path) for path in found)


def _adapters_of(run: RunFolder, step: str, field: str) -> dict[str, Path]:
    """Return each adapter of a run, as of a step, the best one or (empty) the newest one kept."""
    found: dict[str, Path] = {}
    folders = sorted(path for path in run.adapters.glob("*") if path.is_dir())
    if step == "best":
        if not run.best_adapter.is_dir():
            raise ConfigError(
                f"{field}: {run.root} has no best adapter, because it was never evaluated on "
                "held-out tasks or examples (evaluation.tasks, data.held_out); give RUN or RUN@STEP"
            )
        return run.layout(run.best_adapter, [folder.name for folder in folders])
    for folder in folders:
        versions = {str(version): path for version, path in versions_of(folder)}
        version = step or next(reversed(versions), "")
        if version not in versions:
            raise ConfigError(
                f"{field}: {run.root} has no adapter {folder.name!r} of step {step or 'any'}; "
                f"kept are those of: {', '.join(versions) or 'none'}"
            )
        found[folder.name] = versions[version]
    return found


def _refuse_damaged(adapter: Path, field: str) -> None:
    from safetensors import SafetensorError, safe_open

    for file in adapter.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy"):  # reads where its tensors are
                pass
        except SafetensorError as error:
            raise ConfigError(
                f"{field}: {file} is damaged ({error}); bring a copy back, or give another adapter"
            ) from error


def how_to_fetch(folder: Path) -> list[str]:
    """Return the commands that fetch the adapters in a folder, or in its folders, from Tinker.

    Returns none where the weights are here.
    """
    said = [
        json.loads(pointer.read_text(encoding="utf-8"))
        for pointer in sorted({*folder.glob(_POINTER), *folder.glob(f"*/{_POINTER}")})
    ]
    return [f"tinker checkpoint download {one['state'] or one['path']}" for one in said]
