"""Run an agent's command on a task with tests, and reward what the tests say of its work."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.runner import agent_folders
from agentrl.runner.coding_tasks import sandbox, workspace
from agentrl.runner.coding_tasks.sandbox import OF_TESTS, Place, check_bubblewrap
from agentrl.runner.coding_tasks.scoring import rewards, score
from agentrl.runner.coding_tasks.task import CodingTask, parse_task, visible
from agentrl.runner.protocol import AttemptFailed
from agentrl_tracer.emit import emit, emit_reward
from agentrl_tracer.schemas import AttemptState, Json

_LONGEST_OUTPUT = 20_000  # characters that the trace keeps
_NOT_STARTED = (126, 127)
_UNSEEN = ("AGENTRL_TASK", "AGENTRL_ATTEMPT_FOLDER")


def run_attempt(command: Sequence[str], given: Json) -> None:
    """Run the command in a fresh copy of the task's repository, test its work, and reward it.

    The command's exit code is noted and does not count, unless it never asked the model: the tests
    decide.

    Args:
        command: the agent's command line, with the task's values filled in.
        given: the task.

    Raises:
        AttemptFailed: the task cannot be run, the command or the tests did not start, or the
            command failed before it asked the model or took longer than the task's limit.
    """
    parent = os.environ.get("AGENTRL_ATTEMPT_FOLDER") or tempfile.gettempdir()
    Path(parent).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="task-", dir=parent))
    try:
        task = parse_task(given)
        if task.sandbox:
            check_bubblewrap()
        base = workspace.original(task, folder)
        for name in ("work", "home", "report"):
            (folder / name).mkdir()
        workspace.copy(base, folder / "work")
        try:
            _run_agent(task, command, visible(given), folder)
        finally:
            changes = workspace.diff(base, folder / "work")
            emit("diff", changes)
        _test(task, folder, base, changed=bool(changes))
    except ValueError as error:
        raise AttemptFailed(f"task: {error}") from error
    finally:
        agent_folders.remove(folder)


def _place(task: CodingTask, work: Path, home: Path, *writable: Path) -> Place:
    files = (task.hidden, task.repository)
    hidden = [Path(one) for one in files if isinstance(one, str)]
    return Place(
        work, home, task.sandbox, writable, hidden,
        task.limits.cpu_seconds, task.limits.memory_mb,
    )  # fmt: skip


def _run_agent(task: CodingTask, command: Sequence[str], shown: Json, folder: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in _UNSEEN}
    started = time.monotonic()
    done = sandbox.run(
        command,
        _place(task, folder / "work", folder / "home"),
        env,
        gateway=env.get("AGENTRL_GATEWAY"),
        network=task.limits.network,
        stdin=json.dumps(shown).encode() + b"\n",
        seconds=task.limits.seconds,
    )
    seconds = round(time.monotonic() - started, 1)
    emit("command", {"words": list(command), "exit_code": done.code, "seconds": seconds})
    if done.timed_out:
        why = f"the agent's command was still running after limits.seconds, {seconds:g} s"
        raise AttemptFailed(why, AttemptState.TIMEOUT)
    if done.code in _NOT_STARTED:
        raise AttemptFailed(f"the agent's command did not start: exit code {done.code}")
    if done.code and not done.asked:
        why = f"the agent's command ended with exit code {done.code} before it asked the model"
        raise AttemptFailed(f"{why}; its output says more")


def _test(task: CodingTask, folder: Path, base: Path, *, changed: bool) -> None:
    """Run the test command in the agent's copy, and reward."""
    report = folder / "report/junit.xml"
    done = _run_tests(task, folder / "work", report)
    passed, total = (0, 1) if done.timed_out else score(report, done.printed, done.code)
    said = {"passed": passed, "total": total, "exit_code": done.code, "timed_out": done.timed_out}
    emit("tests", said | {"output": workspace.shortened(done.printed, _LONGEST_OUTPUT)})
    if done.code in _NOT_STARTED and not (changed and _starts_untouched(task, folder, base)):
        raise AttemptFailed(f"test: the command did not start: {done.printed.strip()[-300:]}")
    emit_reward(rewards(passed, total, task.shaping, changed=changed))


def _starts_untouched(task: CodingTask, folder: Path, base: Path) -> bool:
    """Whether the test command starts where no agent has worked: then the agent has broken it."""
    untouched = folder / "untouched"
    untouched.mkdir()
    workspace.copy(base, untouched)
    return _run_tests(task, untouched, folder / "report/untouched.xml").code not in _NOT_STARTED


def _run_tests(task: CodingTask, work: Path, report: Path) -> sandbox.Done:
    """Put the hidden files into a copy, and run the test command there."""
    if task.hidden is not None:
        workspace.put(task.hidden, work)
    home = Path(tempfile.mkdtemp(prefix="test-home-", dir=work.parent))
    env = {name: os.environ[name] for name in OF_TESTS if name in os.environ}
    env["PYTEST_ADDOPTS"] = f"--junitxml={report} -p no:cacheprovider"
    return sandbox.run(
        ["sh", "-c", task.test],
        _place(task, work, home, report.parent),
        env,
        keep_output=True,
        seconds=task.limits.test_seconds,
    )
