"""Agents that look for keys, for the store and for each other: what they find in each confinement.

Root may read everything, so trainer and agents run as an unprivileged user here, or as two users.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runner_harness import RunnerHarness

from agentrl.runner.agent_process.confinement import check_confinement, sandbox_command
from agentrl.runner.pool_client import start_pool

_STANDARD = {sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}/lib-dynload"}
SPY = Path(__file__).parents[3] / "support/spying_agent.py"
WRITTEN = Path("/tmp/written-by-an-agent")
UNPRIVILEGED = "nobody"  # a user of every Linux system
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that belongs to the unprivileged user; pytest's own belong to root."""
    made = Path(tempfile.mkdtemp(prefix="agentrl-spied-"))
    if os.geteuid() == 0:
        os.chown(made, pwd.getpwnam(UNPRIVILEGED).pw_uid, -1)
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def _interpreter() -> str:
    """Return an interpreter of this version that the unprivileged user may run."""
    usual = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, shutil.which(usual, path="/usr/local/bin:/usr/bin")):
        if python and all(part.stat().st_mode & 0o001 for part in Path(python).resolve().parents):
            return python
    pytest.skip("the unprivileged user may run no interpreter of this version")


def spied(folder: Path, *, trainer: str | None, **settings: Any) -> list[dict[str, Any]]:
    """Run the script, as the user ``trainer``; return what its two agents found."""
    account: Any = {}
    if trainer is not None and os.geteuid() == 0:
        entry = pwd.getpwnam(trainer)
        account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    paths = [str(SPY.parent), *(one for one in sys.path if one not in _STANDARD)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "HOME": "/nonexistent"}
    command = [_interpreter(), str(SPY), str(folder), json.dumps(settings)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=env,
        cwd="/",
        **account,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["errors"], said["errors"]
    assert len(said["found"]) == 2, said
    assert {*said["modes"].values()} == {"0o600"}
    return said["found"]


def test_agents_of_the_same_user_read_no_process(folder: Path) -> None:
    """Neither trainer, gateway, store's process, pool, worker nor sibling; their files they can."""
    for found in spied(folder, trainer=UNPRIVILEGED):
        assert found["uid"] != 0
        assert len(found["seen"]) == 2  # the sibling was there
        assert found["read"] and not [one for one in found["read"] if one.startswith("/proc")]  # noqa: PT018
        assert not [one for one in found["open"] if "store.db" in one]


@needs_root
def test_agents_of_another_user_reach_no_file_either(folder: Path) -> None:
    folder.chmod(0o755)
    for found in spied(folder, trainer=None, user=UNPRIVILEGED):
        assert found["uid"] == pwd.getpwnam(UNPRIVILEGED).pw_uid
        assert found["read"] == found["wrote"] == []
        assert not [one for one in found["open"] if "store.db" in one]


@needs_bwrap
def test_agents_in_a_sandbox_see_neither_processes_nor_the_run(folder: Path) -> None:
    WRITTEN.unlink(missing_ok=True)
    for found in spied(folder, trainer=UNPRIVILEGED, sandbox=True):
        assert found["uid"] != 0
        assert found["wrote"] == []
        # The first process of the sandbox is its own.
        assert not [one for one in found["read"] if not one.startswith("/proc/1/")]
    assert not WRITTEN.exists()


@needs_bwrap
def test_a_sandbox_hides_a_folder_wherever_it_is(harness: RunnerHarness) -> None:
    hidden = str(Path(__file__).parent)  # else it would be among the temporary ones
    command = sandbox_command(harness.config("good", hidden=[hidden]))
    listed = subprocess.run([*command, "ls", "-A", hidden], capture_output=True, check=True)
    assert listed.stdout == b""


def test_an_agent_inherits_neither_password_nor_connection_of_the_store(
    tmp_path: Path, postgres: str
) -> None:
    secret = "correct-horse-battery-staple"
    scheme, rest = postgres.split("://")
    user, _, place = rest.rpartition("@")
    store = f"{scheme}://{user.partition(':')[0] or 'postgres'}:{secret}@{place}"
    with contextlib.closing(RunnerHarness(tmp_path, store)) as harness:
        config = replace(harness.config("good"), agent=f"{SPY}:spy")
        harness.pools.append(start_pool(config))
        task = {"meeting": "", "meets": False, "files": [], "terces": secret[::-1]}
        [attempt] = harness.finish(harness.enqueue(task))
        assert attempt.error is None
        log = Path(attempt.log or "").read_text()
    found = json.loads(log.partition("FOUND ")[2].splitlines()[0])
    assert found["memory"] == []
    # To its worker, and of the gateway's clients.
    assert len([one for one in found["open"] if one.startswith("socket:")]) <= 2, found["open"]


@needs_bwrap
def test_a_sandbox_that_would_show_the_home_folder_is_refused(
    harness: RunnerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"agent\.sandbox: {tmp_path}, which the sandbox hides"):
        check_confinement(harness.config("good", sandbox=True))


@needs_root
@needs_bwrap
def test_root_cannot_undo_the_sandbox(harness: RunnerHarness) -> None:
    hidden = str(Path(__file__).parent)
    command = sandbox_command(harness.config("good", hidden=[hidden]))
    undo = f"umount -l {hidden}; mount -o remount,rw,bind / && echo MOUNTED; ls -A {hidden}"
    look = f"{undo}; test -w /proc/sys/kernel/hostname && echo WRITES; true"
    done = subprocess.run([*command, "sh", "-c", look], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"user": "no-such-user"}, "agent.user: (there is no user|only root)"),
        ({"user": "root"}, "agent.user: (root may read everything|only root)"),
        ({"sandbox": True}, "agent.sandbox: bubblewrap is not installed: apt install bubblewrap"),
    ],
)
def test_what_cannot_confine_is_refused(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch, settings: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=said):
        check_confinement(harness.config("good", **settings))
