"""Agents run in another virtual environment, which is checked first."""

from __future__ import annotations

import venv
from pathlib import Path

import opentelemetry
import pytest
from runner_harness import RunnerHarness

from agentrl_tracer.schemas import AttemptState, Policies


@pytest.fixture(scope="module")
def other_venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment with OpenTelemetry, one package of its own, and nothing of ours."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("answer = 42\n")
    ours = Path(next(iter(opentelemetry.__path__))).parent
    wanted = ("opentelemetry", "requests", "urllib3", "charset_normalizer", "idna", "certifi",
              "google", "googleapis_common_protos", "importlib_metadata", "zipp",
              "typing_extensions", "wrapt")  # fmt: skip
    for path in ours.iterdir():
        if path.name.split("-")[0].split(".")[0].startswith(wanted):
            (packages / path.name).symlink_to(path)
    return str(folder / "bin/python")


def test_an_agent_runs_in_another_virtual_environment(
    harness: RunnerHarness, other_venv: str
) -> None:
    (harness.folder / "agents.py").write_text(
        "import importlib.util, only_there, sys\nfrom agentrl import emit_reward\n"
        "def run(task):\n"
        "    assert importlib.util.find_spec('sqlalchemy') is None\n"
        "    print(sys.executable)\n"
        "    if task['n'] == 5: raise ValueError('there')\n"
        "    emit_reward(only_there.answer + task['n'])\n"
    )
    harness.start("run", Policies(on_error="drop"), python=other_venv, rollouts_per_process=2)
    attempts = harness.finish([*harness.enqueue(count=3), *harness.enqueue({"n": 5})], 60)
    assert [a.state for a in attempts] == [AttemptState.SUCCEEDED] * 3 + [AttemptState.ERROR]
    assert [harness.values(a) for a in attempts] == [[46.0]] * 3 + [[]]
    assert Path(attempts[0].log or "").read_text() == f"{other_venv}\n"
    assert "ValueError: there" in (attempts[3].error or "")


def test_where_forks_are_unsafe_each_process_starts_a_fresh_interpreter(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: the attempt inherits no module of its worker's."""
    monkeypatch.setenv("AGENTRL_START_METHOD", "spawn")
    (harness.folder / "agents.py").write_text(
        "import sys\nfrom agentrl import emit_reward\n"
        "def run(task): emit_reward(0.0 if 'sqlalchemy' in sys.modules else 1.0)\n"
    )
    harness.start("run", Policies(on_error="drop"))
    attempts = harness.finish(harness.enqueue(count=2), 60)
    assert [a.state for a in attempts] == [AttemptState.SUCCEEDED] * 2
    assert [harness.values(a) for a in attempts] == [[1.0]] * 2


def test_an_interpreter_that_cannot_run_agents_is_refused(
    harness: RunnerHarness, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python")
    with pytest.raises(ValueError, match=r"lacks opentelemetry.*-m pip install opentelemetry-sdk"):
        harness.start("good", python=bare)
    with pytest.raises(ValueError, match="is no executable"):
        harness.start("good", python=str(tmp_path / "nowhere"))
