"""Agent specs: what is understood, and what is refused and how."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.runner.agent_spec import AgentSpecError, parse_agent, validate_agent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def takes(task): ...\nclass Crew: ...\n"
    (tmp_path / "my_agent_module.py").write_text(source)
    (tmp_path / "broken.py").write_text("def run(:\n")


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
    assert parsed.kind == kind
    assert (parsed.argv or (parsed.target, parsed.attribute)) == rest


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "empty"),
        ("my_agent_module.py", "names no function"),
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
    "spec",
    ["my_agent_module:takes", "my_agent_module.py:Crew", "sh -c true", "json:loads"],
)
def test_right_specs_pass_without_an_import(spec: str) -> None:
    validate_agent(spec)
    assert "my_agent_module" not in sys.modules


def test_the_trainer_and_the_cli_can_import_the_package_cheaply() -> None:
    code = (
        "import sys, agentrl.runner\n"
        "heavy = {'sqlalchemy', 'opentelemetry', 'torch', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
