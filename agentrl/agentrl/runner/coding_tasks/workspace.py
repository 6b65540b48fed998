"""Make the agent's fresh copy of a repository, put hidden files into it, and compare it."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from agentrl.runner import agent_folders
from agentrl.runner.coding_tasks.printed import Printed
from agentrl.runner.coding_tasks.task import CodingTask, Files
from agentrl_trainer.names import cache_folder

_PREPARE_S = 600.0
_DIFF_S = 60.0
_UNPACKED_AS = 2  # counts the ways to unpack: folders of others are not reused
_LONGEST_DIFF = 100_000  # characters that the trace keeps


def original(task: CodingTask, folder: Path) -> Path:
    """Return the folder of the repository as it is given to every attempt.

    Git URLs and archives are unpacked once for all attempts of this user. Of a git repository the
    files of one commit are kept and its history is not, because it may hold the solution.

    Raises:
        ValueError: there is no such repository, or it cannot be fetched or unpacked.
    """
    given = task.repository
    if task.ref is not None and (isinstance(given, dict) or Path(given).exists()):
        raise ValueError("ref: is for git URLs; that of a folder here is file:///its/path")
    if isinstance(given, dict):
        base = folder / "original"
        base.mkdir()
        put(given, base)
        return base
    if Path(given).is_dir():
        return Path(given).resolve()
    is_archive = Path(given).is_file() and (tarfile.is_tarfile(given) or zipfile.is_zipfile(given))
    if not is_archive and "://" not in given and not given.startswith("git@"):
        raise ValueError(f"repository: {given!r} is no folder, archive or git URL")
    changed = os.stat(given).st_mtime_ns if is_archive else ""
    what = f"{_UNPACKED_AS}\n{given}\n{task.ref}\n{changed}"
    name = hashlib.sha256(what.encode()).hexdigest()[:32]
    kept = _cache() / name
    if not kept.is_dir():
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_cache()))
        try:
            (_unpack if is_archive else _clone)(given, task.ref, made)
            with contextlib.suppress(OSError):  # another attempt was faster
                made.rename(kept)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    inside = list(kept.iterdir())
    single = is_archive and len(inside) == 1 and inside[0].is_dir()
    return inside[0] if single else kept


def _cache() -> Path:
    folder = cache_folder() / "repositories"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unpack(archive: str, _ref: str | None, folder: Path) -> None:
    try:
        if tarfile.is_tarfile(archive):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        else:
            with zipfile.ZipFile(archive) as file:
                for member in file.infolist():
                    _unzip(file, member, folder)
    except (
        OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise ValueError(f"repository: cannot unpack {archive!r}: {error}") from error


def _unzip(file: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    """Unpack one file with its executable bits, which ``ZipFile.extract`` leaves out."""
    mode = member.external_attr >> 16
    if stat.S_ISLNK(mode):
        raise zipfile.BadZipFile(f"{member.filename} is a link; give a tar archive")
    place = file.extract(member, folder)
    if not member.is_dir():
        os.chmod(place, 0o644 | mode & 0o111)


def _clone(url: str, ref: str | None, folder: Path) -> None:
    git = ["git", "-C", str(folder)]
    for command in (
        [*git, "init", "-q"],
        [*git, "fetch", "-q", "--depth=1", "--", url, ref or "HEAD"],
        [*git, "checkout", "-q", "FETCH_HEAD"],
    ):
        env = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PREPARE_S, check=False, env=env
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"repository: cannot fetch {url!r}: {error}") from error
        if done.returncode:
            raise ValueError(f"repository: cannot fetch {url!r}: {done.stderr.strip()[-500:]}")
    shutil.rmtree(folder / ".git")


def copy(base: Path, target: Path) -> None:
    """Copy a folder; its files share their blocks with the original where the system can."""
    if sys.platform == "linux":
        command = ["cp", "-a", "--reflink=auto", f"{base}/.", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"repository: cannot copy {base}: {done.stderr.strip()[-500:]}")
    else:
        shutil.copytree(base, target, symlinks=True, dirs_exist_ok=True)


def put(files: Files, root: Path) -> None:
    """Write files into a folder, in place of whatever is there.

    The agent may have left links in their places; they are replaced, never followed. It may have
    taken the right to write away.
    """
    try:
        _put(files, root)
    except PermissionError:
        agent_folders.make_writable(root)
        _put(files, root)


def _put(files: Files, root: Path) -> None:
    for path, content, mode in _contents(files):
        place = root
        *parents, name = Path(path).parts
        for part in parents:
            place = place / part
            if place.is_symlink() or not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir()
        place = place / name
        if place.is_dir() and not place.is_symlink():
            agent_folders.remove(place)
        place.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(place, flags, mode), "wb") as file:
            file.write(content)


def _contents(files: Files) -> Iterator[tuple[str, bytes, int]]:
    if isinstance(files, dict):
        for path, content in files.items():
            yield path, content.encode(), 0o755 if content.startswith("#!") else 0o644
    else:
        root = Path(files)
        for path in filter(Path.is_file, sorted(root.rglob("*"))):
            yield str(path.relative_to(root)), path.read_bytes(), stat.S_IMODE(path.stat().st_mode)


def diff(base: Path, work: Path) -> str:
    """Return what the agent changed, as a unified diff; a long one without its middle."""
    command = ["diff", "-ruN", "--no-dereference", "-x", ".git", "-x", "__pycache__", base, work]
    printed = Printed()
    try:
        subprocess.run(
            command, stdout=printed.pipe, stderr=subprocess.DEVNULL, timeout=_DIFF_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"(no diff: {error})"
    finally:
        printed.close()
    text = printed.text().replace(str(base), "a").replace(str(work), "b")
    return shortened(text, _LONGEST_DIFF)


def shortened(text: str, longest: int) -> str:
    """Return a text without its middle where it is too long."""
    half = longest // 2
    left_out = len(text) - longest
    return (
        text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters ...\n{text[-half:]}"
    )
