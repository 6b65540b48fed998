"""``agentrl inspect``: the program of inspect_ai against a served adapter."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import agentrl
from fake_gateway import until
from tiny_policy import trained_run

from agentrl.cli.inspect import inspect_command
from agentrl.config.errors import ConfigError
from agentrl_tracer.store import Store

INSPECT = os.environ.get("AGENTRL_TEST_INSPECT")
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def hello(count: int = 4):
    samples = [
        Sample(input=f"Let's play a game. Say you are {n}.", target="") for n in range(count)
    ]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


def test_what_is_missing_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inspect\.command: .*install inspect_ai"):
        inspect_command("task.py", "--command", str(tmp_path / "inspect"))
    for name in ("asker", "answerer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="name one with --adapters: answerer, asker"):
        inspect_command("task.py", "--command", "true", "--adapter-path", str(tmp_path))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_inspect_time_for_its_log(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    program, up = tmp_path / "inspect", tmp_path / "up"
    program.write_text(
        "#!/bin/sh\ntrap 'sleep 1; echo written > log; exit 1' INT\n"
        "touch up; while true; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "agentrl", "inspect", "task.py", "--command", str(program)],
        cwd=tmp_path, start_new_session=True,
    ) as running:  # fmt: skip
        until(up.exists, 60)
        if number == signal.SIGINT:  # by the terminal, which sends it to all
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        assert running.wait(30) == code
    assert (tmp_path / "log").read_text() == "written\n"


@pytest.mark.inspect
@pytest.mark.timeout(600)
@pytest.mark.skipif(INSPECT is None, reason="AGENTRL_TEST_INSPECT is not inspect_ai's program")
def test_inspect_scores_a_served_adapter(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    given = [
        "--command", INSPECT, "--adapter-path", run.root, "--store", tmp_path / "calls.db",
        "--args", "-T count=3 --temperature 0 --max-tokens 8 --display plain",
    ]  # fmt: skip
    done = agentrl("inspect", "task.py@hello", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy  1.000" in done.stdout  # every answer includes nothing
    assert len(list((tmp_path / "logs").glob("*.eval"))) == 1
    with contextlib.closing(Store(str(tmp_path / "calls.db"))) as store:
        calls = store.calls()
    assert [(call.adapter, call.params["max_tokens"]) for call in calls] == [("policy", 8)] * 3
    done = agentrl("inspect", "task.py@unknown", *given, cwd=tmp_path)
    assert done.returncode != 0
