"""Confine agents: to another user (``agent.user``), and to a sandbox (``agent.sandbox``).

The sandbox is bubblewrap's (https://github.com/containers/bubblewrap): a file system that is
read-only but for a /tmp and a home folder of the attempt's own, without the run's folder and
store, and a /proc that shows the attempt's own processes. The network stays.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import agentrl
import agentrl_tracer
from agentrl.runner.agent_spec import parse_agent
from agentrl.runner.coding_tasks.sandbox import without_privileges
from agentrl.runner.protocol import RunnerConfig

_CHECK_S = 30.0
_MASKED = ("/tmp", "/var/tmp", "/run")  # with the sockets of other processes


def check_confinement(config: RunnerConfig) -> None:
    """Check that agents can be confined as the settings say.

    Raises:
        ValueError: this process is not root, there is no such user, it cannot read the agent, or
            there is no bubblewrap, or it may not make namespaces.
    """
    user: dict[str, object] = {}
    if config.user is not None:
        if os.geteuid() != 0:
            raise ValueError("agent.user: only root can run agents as another user")
        try:
            account = pwd.getpwnam(config.user)
        except KeyError:
            raise ValueError(f"agent.user: there is no user {config.user!r}") from None
        if account.pw_uid == 0:
            raise ValueError("agent.user: root may read everything; name another user")
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        agent = parse_agent(config.agent)
        for file in [sys.executable, *([agent.target] if agent.kind == "file" else [])]:
            if _fails(["test", "-r", os.path.abspath(file)], user):
                raise ValueError(f"agent.user: {config.user} may not read {file}")
    if config.sandbox:
        if shutil.which("bwrap") is None:
            raise ValueError("agent.sandbox: bubblewrap is not installed: apt install bubblewrap")
        if shown := set(_masked(config)) & set(map(os.path.realpath, _needed(config))):
            raise ValueError(
                f"agent.sandbox: {shown.pop()}, which the sandbox hides, is the current folder, or "
                "that of the agent's file or of Python's modules; use a folder of its own"
            )
        python = config.python or sys.executable
        if why := _fails([*sandbox_command(config), python, "-c", "import json"], user):
            raise ValueError(f"agent.sandbox: bubblewrap cannot make one here: {why}")


def _fails(command: list[str], user: dict[str, object]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CHECK_S, check=False, **user  # type: ignore[call-overload]
    )  # fmt: skip
    return done.stderr.strip()[-500:] or "it failed" if done.returncode else ""


def become_user(name: str) -> None:
    """Give up root for good: this process, just forked, and what it starts are ``name``'s."""
    account = pwd.getpwnam(name)
    os.initgroups(name, account.pw_gid)
    os.setresgid(*[account.pw_gid] * 3)
    os.setresuid(*[account.pw_uid] * 3)
    os.environ.update(HOME=account.pw_dir, USER=name, LOGNAME=name)


def sandbox_command(config: RunnerConfig) -> list[str]:
    """Return the command that runs another one, which follows, in a sandbox."""
    home = _home(config)
    needed, masked = set(map(os.path.realpath, _needed(config))), _masked(config)
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    command += without_privileges(root=os.geteuid() == 0 and config.user is None)
    for path in masked:
        command += ["--tmpfs", path]
    for path in ("/run/systemd/resolve", "/run/resolvconf", "/run/nscd"):  # of name look-ups
        command += ["--ro-bind-try", path, path]
    for path in sorted(needed):  # a folder before those in it
        if path.startswith(tuple(f"{mask}/" for mask in masked)):
            command += ["--ro-bind-try", path, path]
    for path in map(os.path.realpath, config.hidden):
        if os.path.isdir(path):
            command += ["--tmpfs", path, "--remount-ro", path]
    if config.store:
        for path in (config.store, f"{config.store}-wal", f"{config.store}-shm"):
            hidden = path.startswith(tuple(f"{folder}/" for folder in config.hidden))
            if os.path.exists(path) and not hidden:
                command += ["--ro-bind", "/dev/null", path]
    command += ["--setenv", "TMPDIR", "/tmp", "--setenv", "HOME", home, "--chdir", os.getcwd()]
    return [*command, "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--"]


def _home(config: RunnerConfig) -> str:
    return os.path.expanduser(f"~{config.user}" if config.user else "~")


def _masked(config: RunnerConfig) -> list[str]:
    """Return the folders in whose places the attempt has its own."""
    found = [path for path in (*_MASKED, os.path.realpath(_home(config))) if Path(path).is_dir()]
    return [path for path in found if path != "/"]  # of a user without a home folder


def _needed(config: RunnerConfig) -> Iterable[str]:
    """Yield the folders that an attempt reads: those of its code and its interpreter's."""
    agent = parse_agent(config.agent)
    yield os.getcwd()
    if agent.kind == "file":
        yield str(Path(agent.target).absolute().parent)
    for package in (agentrl, agentrl_tracer):
        yield str(Path(package.__path__[0]).parent)
    python = Path(config.python or sys.executable)
    yield from map(str, {python.parent.parent, python.resolve().parent.parent})
    yield from (sys.prefix, sys.base_prefix)
    yield from (path for path in sys.path if os.path.isdir(path))
