"""Coding agents as they ship, each by its profile, in a session of a dozen calls."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from coding_agents import MARK, SUMMARY, Player, Session, Step, play
from fake_gateway import until
from running_gateway import WEIGHTS, running
from scripted_sampler import ScriptedSampler
from store_records import enqueue

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.loading import load
from agentrl.config.profiles import profile_names, read_profile
from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.requests.speakers import SpeakerRule
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME
from agentrl_tracer.schemas import AttemptState, Purpose

PACKAGES = {  # from npm, else from PyPI
    "claude-code": ("npm", "@anthropic-ai/claude-code"),
    "codex": ("npm", "@openai/codex"),
    "opencode": ("npm", "opencode-ai"),
    "qwen-code": ("npm", "@qwen-code/qwen-code"),
    "mini-swe-agent": ("pip", "mini-swe-agent", "mcp"),
    "mini-swe-agent-short": ("pip", "mini-swe-agent"),
    "aider": ("pip", "aider-chat"),
}
ALONE = Path(__file__).parents[2] / "examples/coding_agents/alone.sh"
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
                           ("bash", {"command": SUBMIT})],
        "aider": [],
    }  # fmt: skip


def edit(old: str, new: str) -> str:
    """Aider's way of a call."""
    block = f"a.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```"
    return f"{MARK}\n\n{block}"


PLAIN = [edit("    return a * b", "    return 0"), edit("    return a - b", "    return a + b")]


def executables(
    name: str, temporary: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Install an agent unless AGENTRL_TEST_CODING_AGENTS has it; return the folder of its files."""
    if "coding_agents" not in request.config.getoption("-m"):
        pytest.skip("make coding-agents")  # it installs 1.5 GB
    kind, *packages = PACKAGES[name]
    given = os.environ.get("AGENTRL_TEST_CODING_AGENTS")
    root = (Path(given) if given else temporary.getbasetemp() / "agents") / name.removesuffix(
        "-short"
    )
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
@pytest.mark.parametrize("name", [name for name in PACKAGES if not name.endswith("-short")])
def test_a_session_continues_token_for_token(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    renderer: Renderer,
    request: pytest.FixtureRequest,
) -> None:
    path = executables(name, tmp_path_factory, request)
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


SHELLS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the tool that runs a command
    "claude-code": ("Bash", "command", {}),
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "look"}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
    "mini-swe-agent": ("bash", "command", {}),
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# Contexts in which the long outputs below make each agent compact its conversation.
CONTEXTS = {"claude-code": 65536, "codex": 32768, "opencode": 32768, "qwen-code": 65536}


@pytest.mark.coding_agents
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_compaction_is_a_call_of_its_own_and_the_main_loop_branches_for_it(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    renderer: Renderer,
    request: pytest.FixtureRequest,
) -> None:
    path = executables(name, tmp_path_factory, request)
    work = repository(tmp_path)
    tool, key, more = SHELLS[name]
    long = [f"python3 -c \"print('line {at} of it; ' * 1200)\"" for at in range(16)]
    steps: list[Step] = [(tool, {key: command, **more}) for command in long]
    done = play(name, work, renderer, steps, path=path, plain=[SUMMARY], context=CONTEXTS[name])
    logging.getLogger(__name__).info("%s", report(name, done))
    assert done.code == 0, done.printed[-2000:]
    assert done.reasons("compaction").total() == 1
    main = done.reasons("main")
    assert (main["compacted"], main["history_edited"]) == (1, 0)
    assert set(main) == {"compacted", "continued", *FIRST[name]}


@pytest.mark.coding_agents
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")
@pytest.mark.parametrize("name", [*SHELLS, "mini-swe-agent-short"])
def test_an_agent_solves_a_shipped_task_in_the_sandbox(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    renderer: Renderer,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real gateway, runner, sandbox and agent; the sampler says the reference solution."""
    path = executables(name, tmp_path_factory, request)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    made = runpy.run_path(str(ALONE.with_name("tasks") / "make_tasks.py"))
    [(task, solution)] = made["tasks_with_solutions"](made["python_tasks"], 0, 1)
    commands = ["ls", solution, *[SUBMIT] * name.startswith("mini-swe-agent")]
    if name in SHELLS:
        tool, key, more = SHELLS[name]
        player = Player(renderer, [(tool, {key: command, **more}) for command in commands])
    else:
        texts = [f"{MARK}\n```bash\n{command}\n```" for command in commands]
        player = Player(renderer, [], plain=texts)
    profile = read_profile(name)
    assert profile is not None
    rules = [SpeakerRule(agent, **rule) for agent, rule in profile["speakers"].items()]
    with running(
        tmp_path,
        renderer,
        {},
        sampler=ScriptedSampler(renderer, player),
        context_length=65536,
        speakers=rules,
        leave_out_tools=True,
    ) as gateway:
        [rollout] = enqueue(gateway.store, gateway.run_id, task, split="shipped")
        pool = start_pool(
            RunnerConfig(
                store=gateway.store.url, gateways=[gateway.url], run_id=gateway.run_id,
                agent=profile["agent"]["entrypoint"], model="policy", logs=str(tmp_path / "logs"),
                runners=1, timeout_s=300.0, lease_s=60.0,
            )
        )  # fmt: skip
        unfinished = partial(gateway.store.unfinished_ids, gateway.run_id, Purpose.TRAIN)
        try:
            until(lambda: rollout not in unfinished(), 300.0, pool.log_tail)
        finally:
            pool.stop()
        [attempt] = gateway.store.attempts([rollout])
        spans = gateway.store.spans(rollout)
        calls = gateway.store.calls(attempt_ids=[attempt.id])
        rewards = gateway.store.rewards([rollout])
    assert attempt.state is AttemptState.SUCCEEDED, attempt.error
    assert [(reward.name, reward.value) for reward in rewards] == [("tests", 1.0)]
    said = [span.attributes for span in spans if NOTE_NAME in span.attributes]
    notes = {one[NOTE_NAME]: json.loads(one[NOTE_DATA]) for one in said}
    assert "\n+    return sum(range(n + 1))" in notes["diff"]
    assert notes["tests"]["passed"] == notes["tests"]["total"] == 3
    assert "3/3" in notes["tests"]["output"]
    main = [call.params.get("branched") for call in calls if call.agent == "main"]
    assert main == [*FIRST[name], None, None]


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


LOGINS = (
    "ANTHROPIC_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "CLAUDE_CODE_USE_BEDROCK", "GEMINI_API_KEY",
    "GITHUB_TOKEN", "OPENAI_ORG_ID", "XDG_CONFIG_HOME", "name", "folder",
)  # fmt: skip


def test_a_profile_sees_the_gateway_and_nothing_of_the_users_login(tmp_path: Path) -> None:
    script = tmp_path / "show.sh"
    see = 'env > "$0.seen"; echo "$1" "$HOME" > "$0.home"; touch "$HOME/kept" made; exit 3\n'
    script.write_text(see)
    env = {
        "PATH": os.environ["PATH"], "HOME": "/root", "PWD": str(tmp_path),
        "AGENTRL_ATTEMPT_FOLDER": str(tmp_path / "own"),
        "OPENAI_BASE_URL": "http://gateway/v1", "ANTHROPIC_API_KEY": "sk-rollout",
        "AGENTRL_TASK": "{}", "AGENTRL_CONTEXT_LENGTH": "8192", "JAVA_HOME": "/opt/java",
        "AGENTRL_PASS_ON": "JAVA_HOME", **dict.fromkeys(LOGINS, "secret\nAND=more"),
    }  # fmt: skip
    command = ["sh", str(ALONE), "show.sh", "Fix it."]
    done = subprocess.run(command, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 3
    seen = dict(line.split("=", 1) for line in (tmp_path / "show.sh.seen").read_text().splitlines())
    home = seen.pop("HOME")
    assert home.startswith(str(tmp_path / "own/home-"))
    assert not Path(home).exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "own", "show.sh", "show.sh.home", "show.sh.seen",
    ]  # fmt: skip
    assert (tmp_path / "show.sh.home").read_text() == f"Fix it. {home}\n"
    assert seen.keys() - {"_", "PWD", "OLDPWD", "SHLVL"} == {
        "PATH", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "AGENTRL_CONTEXT_LENGTH", "AGENTRL_ALONE",
        "JAVA_HOME",
    }  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_a_start_script_refuses_to_run_in_the_users_home(name: str) -> None:
    script = ALONE.parent / name / "start.sh"
    done = subprocess.run(["sh", script, "x"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "start it by alone.sh" in done.stderr
