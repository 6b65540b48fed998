"""Coding agents as they ship, each by its profile, in a session of a dozen calls."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coding_agents import MARK, Session, Step, play
from running_gateway import WEIGHTS

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.loading import load
from agentrl.config.profiles import profile_names
from agentrl_proxy.rendering.renderer import Renderer

PACKAGES = {  # from npm, else from PyPI
    "claude-code": ("npm", "@anthropic-ai/claude-code"),
    "codex": ("npm", "@openai/codex"),
    "opencode": ("npm", "opencode-ai"),
    "qwen-code": ("npm", "@qwen-code/qwen-code"),
    "mini-swe-agent": ("pip", "mini-swe-agent", "mcp"),
    "aider": ("pip", "aider-chat"),
}
LOOK, TEST = "cat a.py", "python3 -c 'from a import add; assert add(1, 2) == 3'"
FIX = "sed -i 's/a - b/a + b/' a.py"


def shell(tool: str, key: str, **more: Any) -> list[Step]:
    """Twelve commands: look, see it fail, mend it, see it work, and look around."""
    commands = [LOOK, TEST, FIX, TEST, "ls", "git diff", "wc a.py", LOOK, "grep add a.py", TEST]
    return [(tool, {key: command, **more}) for command in [*commands, "pwd", LOOK]]


def sessions(work: Path) -> dict[str, list[Step]]:
    file = str(work / "a.py")
    swap = {"old_string": "a - b", "new_string": "a + b"}
    helper = {"description": "look", "prompt": "Look at a.py."}
    claude = shell("Bash", "command")
    claude[2:4] = [("Read", {"file_path": file}), ("Edit", {"file_path": file, **swap})]
    qwen = shell("run_shell_command", "command", is_background=False)
    qwen[2:4] = [("read_file", {"file_path": file}), ("edit", {"file_path": file, **swap})]
    code = shell("bash", "command", description="go on")
    old = {"filePath": file, "oldString": "a - b", "newString": "a + b"}
    code[2:4] = [("read", {"filePath": file}), ("edit", old)]
    return {
        "claude-code": [*claude, ("Agent", {**helper, "subagent_type": "Explore"})],
        "codex": [*shell("exec_command", "cmd"), ("multi_agent_v1__spawn_agent",
                                                  {"message": "Look at a.py."})],
        "opencode": [*code, ("task", {**helper, "subagent_type": "general"})],
        "qwen-code": [*qwen, ("agent", {**helper, "subagent_type": "general-purpose"})],
        "mini-swe-agent": [*shell("bash", "command"),
                           ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})],
        "aider": [],
    }  # fmt: skip


def edit(old: str, new: str) -> str:
    """Aider's way of a call."""
    block = f"a.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```"
    return f"{MARK}\n\n{block}"


PLAIN = [edit("    return a * b", "    return 0"), edit("    return a - b", "    return a + b")]


def executables(name: str, folder: Path) -> Path:
    """Install an agent unless AGENTRL_TEST_CODING_AGENTS has it; return the folder of its files."""
    kind, *packages = PACKAGES[name]
    given = os.environ.get("AGENTRL_TEST_CODING_AGENTS")
    root = Path(given) / name if given else folder / name
    here = root / ("node_modules/.bin" if kind == "npm" else "bin")
    if not here.is_dir():
        npm = ["npm", "install", "--prefix", str(root), "--no-audit", "--no-fund"]
        venv, pip = [sys.executable, "-m", "venv", str(root)], [str(root / "bin/pip"), "install"]
        for command in [npm + packages] if kind == "npm" else [venv, pip + packages]:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                pytest.skip(f"{name} could not be installed: {done.stderr[-300:]}")
    return here


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    from transformers import AutoTokenizer

    return Renderer(AutoTokenizer.from_pretrained(WEIGHTS))


def repository(folder: Path) -> Path:
    work = folder / "work"
    work.mkdir()
    (work / "a.py").write_text("def add(a, b):\n    return a - b\n")
    for command in ("git init -q", "git add a.py",
                    "git -c user.name=t -c user.email=t@t commit -q -m a"):  # fmt: skip
        subprocess.run(command.split(), cwd=work, check=True)
    return work


@pytest.mark.coding_agents
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PACKAGES)
def test_a_session_continues_token_for_token(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    renderer: Renderer,
    request: pytest.FixtureRequest,
) -> None:
    if "coding_agents" not in request.config.getoption("-m"):
        pytest.skip("make coding-agents")  # it installs 1.5 GB
    path = executables(name, tmp_path_factory.getbasetemp() / "agents")
    work = repository(tmp_path)
    done = play(name, work, renderer, sessions(work)[name], path=path, plain=PLAIN)
    logging.getLogger(__name__).info("%s", report(name, done))
    assert done.code == 0, done.printed[-2000:]
    assert "return a + b" in (work / "a.py").read_text()
    refused = [one["path"] for one in done.requests if one["method"] == "POST"
               and one["status"] != 200]  # fmt: skip
    assert not refused
    assert all(call.params.get("temperature") != 0 for call in done.calls)
    main = done.reasons("main")
    if name == "aider":  # one message at a time: it asks again only after a failed edit
        assert main.total() == 2
        return
    assert main.total() >= 12
    assert set(main) == {"continued", *FIRST[name]}
    helped = done.reasons("subagent")
    assert bool(helped) == (name != "mini-swe-agent")


FIRST = {name: ["first_call"] for name in PACKAGES} | {"opencode": ["new_conversation"]}


def report(name: str, done: Session) -> str:
    agents = dict.fromkeys(call.agent or "?" for call in done.calls)
    said = [f"{agent} {dict(done.reasons(agent))}" for agent in agents]
    longest = max((len(call.prompt_ids) for call in done.calls), default=0)
    return f"{name}: {'; '.join(said)}; longest prompt {longest}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_profile_is_a_short_name(name: str) -> None:
    trained = load(TrainConfig, [name, "--tasks", "t.jsonl", "--timeout", "5"], {})
    assert name in trained.agent.entrypoint
    assert "{instruction}" in trained.agent.entrypoint
    assert trained.rollouts.timeout == 5  # a flag wins
    assert trained.rollouts.max_calls_per_rollout is not None
    assert "main" in trained.speakers
    assert set(trained.algorithm.skip_agents) <= {*trained.speakers}
    tried = load(EvalConfig, [name, "--tasks", "t.jsonl"], {})
    assert tried.agent.entrypoint == trained.agent.entrypoint


def test_all_profiles_are_here() -> None:
    assert set(profile_names()) == {*PACKAGES}
