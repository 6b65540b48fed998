"""Agent specs: what is understood, what is refused and how, and what the agent is called with."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.runner.agent_spec import (
    AgentSpecError,
    CommandFailed,
    load_agent,
    load_target,
    parse_agent,
    unknown_placeholders,
    validate_agent,
)

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


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def run(:\n")
    (tmp_path / "my_agent_module.py").write_text(SOURCE)
    yield tmp_path / "my_agent_module.py"
    for name in ("my_agent_module", "_agentrl_my_agent_module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("spec", "kind", "rest"),
    [
        ("pkg.mod:fn", "module", ("pkg.mod", "fn")),
        ("dir/a.py:obj.method", "file", ("dir/a.py", "obj.method")),
        ("node agent.js --n {n}", "command", ("node", "agent.js", "--n", "{n}")),
        ("-- sh", "command", ("sh",)),
        ("sh", "command", ("sh",)),
        ("python my.py:f", "command", ("python", "my.py:f")),
    ],
)
def test_specs_are_understood(spec: str, kind: str, rest: tuple[str, ...]) -> None:
    parsed = parse_agent(spec)
    assert (parsed.kind, parsed.argv or (parsed.target, parsed.attribute)) == (kind, rest)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "empty"),
        ("my_agent_module.py", "names no function: 'my_agent_module.py:NAME' (it has ['takes'"),
        ("missing.py", "names no function: 'missing.py:NAME'"),
        ("nothing-like-it", "no such executable"),
        ("missing.py:run", "no file"),
        ("my_agent_module.py:nope", "defines no 'nope'"),
        ("my_agent_module:nope", "defines no 'nope'"),
        ("no_such_module_xyz:run", "no module 'no_such_module_xyz'"),
        ("json.nothere:run", "no module 'json.nothere'"),
        ("no-such-command --flag", "no executable 'no-such-command'"),
        ("sh 'unclosed", "does not parse"),
        ("broken.py:run", "syntax error"),
    ],
)
def test_wrong_specs_are_refused_early_and_clearly(spec: str, problem: str) -> None:
    with pytest.raises(AgentSpecError) as refused:
        validate_agent(spec)
    message = str(refused.value)
    assert message.startswith(f"agent: got {spec!r}")
    assert problem in message
    assert "allowed:" in message


@pytest.mark.parametrize(
    "spec", ["my_agent_module:takes", "my_agent_module.py:Crew", "sh -c true", "json:loads"]
)
def test_right_specs_pass_without_an_import(spec: str) -> None:
    validate_agent(spec)
    assert "my_agent_module" not in sys.modules


def test_the_trainer_and_the_cli_can_start_runners_without_heavy_imports() -> None:
    code = (
        "import sys, agentrl.runner.pool_client\n"
        "heavy = {'sqlalchemy', 'opentelemetry', 'torch', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    file.write_text("import not_installed_xyz\ndef run(task): ...\n")
    sys.modules.pop("my_agent_module", None)
    with pytest.raises(ModuleNotFoundError, match="not_installed_xyz"):
        load_agent("my_agent_module:run")


def test_a_file_can_import_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "neighbor_xyz.py").write_text("VALUE = 7\n")
    (folder / "main_xyz.py").write_text("import neighbor_xyz as n\ndef run(): return n.VALUE\n")
    assert load_agent("elsewhere/main_xyz.py:run").run({}) == 7
    del sys.modules["neighbor_xyz"], sys.modules["main_xyz"]


def test_a_file_is_imported_once_though_its_name_is_taken(tmp_path: Path) -> None:
    for folder in "first", "second":
        file = tmp_path / folder / "taken_by_another.py"
        file.parent.mkdir()
        file.write_text("def agent(task): ...")
        spec = f"{file}:agent"
        once, again = (load_target(spec, parse_agent(spec)) for _ in range(2))
        assert once is again
        assert once.__code__.co_filename == str(file)


def test_commands_get_the_task(capfd: pytest.CaptureFixture[str]) -> None:
    load_agent("sh -c 'cat; echo \"$0|$1\"' {a} {b}-{missing}").run({"a": "x y", "b": [1]})
    assert capfd.readouterr().out == '{"a": "x y", "b": [1]}\nx y|[1]-{missing}\n'
    spec, tasks = "sh -c true {a} {b} {a} {awk}", [{"a": 1}, {"b": 2}]
    assert unknown_placeholders(spec, tasks) == ["awk"]
    with pytest.raises(CommandFailed, match="killed by signal 9"):
        load_agent("sh -c 'kill -9 $$'").run({})
