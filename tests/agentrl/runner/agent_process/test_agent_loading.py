"""What an agent is called with, and what cannot be one."""

import sys
from pathlib import Path

import pytest

from agentrl.runner.agent_process.loading import CommandFailed, load_agent
from agentrl.runner.agent_spec import AgentSpecError

SOURCE = """
import functools
def takes(task): return task
def takes_none(): return "none"
def optional(verbose=False): return verbose
def maybe(task=None): return task
async def later(task): return task
class Crew:
    def kickoff(self, inputs): return inputs
class Run:
    async def run(self, task): return task
class Box:
    inner = Run()
crew = Crew()
partial = functools.partial(takes)
number = 3
"""
OTHERS = {"takes_none": "none", "optional": False}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent_module.py").write_text(SOURCE)
    yield tmp_path / "my_agent_module.py"
    for name in ("my_agent_module", "_agentrl_my_agent_module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name",
    ["takes", "maybe", "later", "Crew", "crew", "Run", "Box.inner.run", "partial", *OTHERS],
)
def test_agents_are_called_with_the_task(file: Path, name: str) -> None:
    task = {"q": 1}
    assert load_agent(f"{file}:{name}").run(task) == OTHERS.get(name, task)
    sys.modules.pop("my_agent_module", None)
    assert load_agent(f"my_agent_module:{name}").run(task) == OTHERS.get(name, task)


def test_what_cannot_be_called_is_refused(file: Path) -> None:
    with pytest.raises(AgentSpecError, match="names a int"):
        load_agent(f"{file}:number")
    with pytest.raises(AgentSpecError, match="no attribute 'gone'"):
        load_agent(f"{file}:crew.gone")


def test_a_missing_import_of_the_agent_is_its_own_error(file: Path) -> None:
    file.write_text("import not_installed_xyz\ndef run(task): ...\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_xyz"):
        load_agent("my_agent_module:run")


def test_a_file_can_import_what_lies_beside_it(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "neighbor_xyz.py").write_text("VALUE = 7\n")
    (folder / "main_xyz.py").write_text("import neighbor_xyz as n\ndef run(): return n.VALUE\n")
    assert load_agent("elsewhere/main_xyz.py:run").run({}) == 7
    del sys.modules["neighbor_xyz"], sys.modules["main_xyz"]


def test_commands_get_the_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_agent("sh -c 'cat; echo \"$0|$1\"' {a} {b}-{missing}").run({"a": "x y", "b": [1]})
    assert capfd.readouterr().out == '{"a": "x y", "b": [1]}\nx y|[1]-{missing}\n'


def test_a_killed_command_is_an_error() -> None:
    with pytest.raises(CommandFailed, match="killed by signal 9"):
        load_agent("sh -c 'kill -9 $$'").run({})
