"""Tasks with tests, run by runners with commands in place of coding agents."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runner_harness import RunnerHarness

from agentrl.runner.coding_tasks import sandbox, workspace
from agentrl.runner.coding_tasks.printed import Printed
from agentrl.runner.coding_tasks.scoring import rewards, score
from agentrl.runner.coding_tasks.task import parse_task
from agentrl_tracer.conventions import NOTE_DATA, NOTE_NAME
from agentrl_tracer.schemas import Attempt, AttemptState, Policies

MAKE_TASKS = Path(__file__).parents[4] / "examples/coding_agents/tasks/make_tasks.py"
ONCE = Policies(on_error="drop", max_infrastructure_retries=0)
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")
TASK = {
    "repository": {"a.txt": "one\n"},
    "instruction": "Write two.",
    "hidden": {"secret/check.sh": "grep -q two a.txt && echo 2/2 || echo 1/2\n"},
    "test": "sh secret/check.sh",
    "sandbox": False,
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerHarness]:
    """Runners whose command is the task's key ``command``."""
    harness = RunnerHarness(tmp_path_factory.mktemp("commands"))
    harness.start("sh -c {command}", ONCE, runners=2)
    yield harness
    harness.close()


def attempt_of(commands: RunnerHarness, command: str, **task: Any) -> Attempt:
    [attempt] = commands.finish(commands.enqueue({**TASK, "command": command, **task}), 60)
    return attempt


def notes_of(commands: RunnerHarness, attempt: Attempt) -> dict[str, Any]:
    spans = commands.store.spans(attempt.rollout_id)
    return {
        span.attributes[NOTE_NAME]: json.loads(span.attributes[NOTE_DATA])
        for span in spans
        if NOTE_NAME in span.attributes
    }


def test_the_reward_is_the_share_of_passed_tests_and_the_diff_is_kept(
    commands: RunnerHarness,
) -> None:
    shaping = {"all": 1, "changed": 0.25}
    poor = attempt_of(commands, "echo three > b.txt", shaping=shaping)
    good = attempt_of(commands, "echo two >> a.txt; exit 3", shaping=shaping)
    assert sorted(commands.values(poor)) == [0.0, 0.25, 0.5]
    assert sorted(commands.values(good)) == [0.25, 1.0, 1.0]
    found = notes_of(commands, good)
    assert "+two" in found["diff"]
    assert "secret" not in found["diff"]
    assert found["command"]["exit_code"] == 3
    assert found["tests"]["output"] == "2/2\n"
    assert not list(Path("/tmp").glob(f"agentrl-{good.id}"))


def test_the_agent_is_shown_neither_hidden_files_nor_test(commands: RunnerHarness) -> None:
    attempt = attempt_of(
        commands, "cat > task; env > env; ls > files; cat /proc/$PPID/cmdline > up"
    )
    shown = notes_of(commands, attempt)["diff"]
    assert "Write two." in shown
    assert "OPENAI_BASE_URL" in shown
    assert "secret" not in shown


def test_what_an_attempt_leaves_running_is_ended_before_the_tests(commands: RunnerHarness) -> None:
    left = "(setsid sh -c 'sleep 0.5; echo two > a.txt' &)"
    attempt = attempt_of(commands, left, test="sleep 1; sh secret/check.sh")
    assert commands.values(attempt) == [0.5]


def test_limits_end_the_command(commands: RunnerHarness) -> None:
    late = attempt_of(commands, "sleep 30", limits={"seconds": 0.5})
    assert late.state is AttemptState.TIMEOUT
    assert "limits.seconds" in (late.error or "")
    grow = "python3 -c 'print(len(bytes(300 << 20)))' > size; echo two > a.txt"
    bounded = attempt_of(commands, grow, limits={"memory_mb": 200, "cpu_seconds": 20})
    assert "+3145" not in notes_of(commands, bounded)["diff"]
    endless = attempt_of(commands, "true", test="sleep 9", limits={"test_seconds": 0.3})
    assert commands.values(endless) == [0.0]


def test_a_command_or_test_that_cannot_start_is_an_error(commands: RunnerHarness) -> None:
    missing = attempt_of(commands, "exec no-such-agent")
    assert missing.state is AttemptState.ERROR
    assert "did not start" in (missing.error or "")
    untested = attempt_of(commands, "true", test="no-such-test")
    assert "no-such-test" in (untested.error or "")
    assert commands.values(untested) == []


def test_an_agent_that_keeps_the_test_from_starting_has_failed_it(commands: RunnerHarness) -> None:
    task = {"repository": {"run.sh": "#!/bin/sh\necho 2/2\n"}, "test": "./run.sh"}
    assert commands.values(attempt_of(commands, "true", **task)) == [1.0]
    assert commands.values(attempt_of(commands, "rm run.sh", **task)) == [0.0]
    wrong = attempt_of(commands, "echo x > b.txt", **task | {"test": "./no-such-test"})
    assert "no-such-test" in (wrong.error or "")


def test_thousands_of_nested_folders_are_removed_and_the_result_stays(
    commands: RunnerHarness,
) -> None:
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    attempt = attempt_of(commands, f'echo two > a.txt; python3 -c "{deep}"')
    assert commands.values(attempt) == [1.0]
    assert not list(Path("/tmp").glob(f"agentrl-{attempt.id}"))


def test_reference_solutions_solve_every_kind_of_shipped_task(commands: RunnerHarness) -> None:
    made = runpy.run_path(str(MAKE_TASKS))
    known: dict[str, dict[str, Any]] = {}
    for make in (made[f"{what}_tasks"] for what in ("shell", "pipe", "python")):
        for held_out in (False, True):
            found = made["tasks_with_solutions"](make, 0, 16, held_out=held_out)
            known |= {f"{task['kind']} {held_out}": dict(task, solution=s) for task, s in found}
    assert len(known) == 34
    ids = {}
    for name, task in known.items():
        solution = task.pop("solution")
        for command in (solution, "true"):
            asked = task | {"command": command, "sandbox": False}
            ids[name, command == solution] = commands.enqueue(asked)[0]
    commands.finish(list(ids.values()), 120)
    for (name, solved), rollout_id in ids.items():
        [reward] = [one.value for one in commands.store.rewards([rollout_id])]
        assert reward == 1.0 if solved else reward < 1.0, name


def test_shipped_tasks_are_what_the_generator_writes(tmp_path: Path) -> None:
    shutil.copy(MAKE_TASKS, tmp_path)
    subprocess.run(["python3", str(tmp_path / MAKE_TASKS.name)], check=True)
    for file in tmp_path.glob("*.jsonl"):
        assert file.read_bytes() == MAKE_TASKS.with_name(file.name).read_bytes()
        for line in file.read_text().splitlines():
            parse_task(json.loads(line))


@needs_bwrap
def test_a_command_that_fails_before_it_asks_the_model_is_an_error(commands: RunnerHarness) -> None:
    broken = attempt_of(commands, "exit 3", sandbox=True)
    assert broken.state is AttemptState.ERROR
    assert "exit code 3 before it asked the model" in (broken.error or "")
    assert commands.values(broken) == []
    asked = attempt_of(commands, "curl -s $AGENTRL_GATEWAY/healthz; exit 3", sandbox=True)
    assert commands.values(asked) == [0.5]


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to lose")
def test_root_cannot_undo_the_sandbox(commands: RunnerHarness) -> None:
    undo = "mount -o remount,rw,bind /etc && touch /etc/agentrl-test"
    look = f"({undo}; umount -l /tmp; test -w /proc/sys/kernel/hostname && echo WRITES) > said 2>&1"
    attempt = attempt_of(commands, look + "; true", test="cat said; echo 1/1", sandbox=True)
    assert commands.values(attempt) == [1.0], attempt.error
    said = notes_of(commands, attempt)["tests"]["output"]
    assert not Path("/etc/agentrl-test").exists()
    assert said.count("mount") >= 2  # both were refused
    assert "WRITES" not in said


def test_of_folders_with_other_files_a_program_is_shown_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    places = ("home/bin", "home/.local/bin", "home/.pyenv/shims", "tool/bin", "project/bin")
    for place in places:
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    (project / "venv-here/bin").mkdir(parents=True)
    (project / "pyvenv.cfg").touch()
    monkeypatch.chdir(project / "venv-here")
    assert [*sandbox._package(str(project / "bin/python"))] == [str(project)]
    (project / "pyvenv.cfg").unlink()
    monkeypatch.chdir(project)
    shown = {
        "home/bin/agent": ["home/bin/agent"],
        "home/.local/bin/agent": ["home/.local/bin/agent", "home/.local/lib"],
        "home/.pyenv/shims/python": ["home/.pyenv"],
        "tool/bin/agent": ["tool"],
        "project/bin/agent": ["project/bin/agent"],
        "project/agent.sh": ["project/agent.sh"],
        "home/npm/node_modules/.bin/agent": ["home/npm/node_modules"],
    }
    for program, paths in shown.items():
        found = [*sandbox._package(str(tmp_path / program))]
        assert found == [str(tmp_path / path) for path in paths]
    assert [*sandbox._package("/bin/sh")] == ["/bin/sh"]


def test_of_long_output_the_beginning_and_the_end_are_kept() -> None:
    printed = Printed()
    subprocess.run(
        ["sh", "-c", "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo 3/4"],
        stdout=printed.pipe,
        check=True,
    )
    printed.close()
    text = printed.text()
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\n3/4\n")
    cut = 5_000_000 + len("first\n" + "\n3/4\n") - 2 * 2**20
    assert f"x\n... {cut} bytes ...\nx" in text
    assert len(text) < 2 * 2**20 + 100


@needs_bwrap
def test_in_the_sandbox_an_agent_reaches_the_gateway_and_nothing_else(
    commands: RunnerHarness, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/check.sh").write_text("echo 1/1\n")
    listener = socket.create_server(("127.0.0.1", 0))  # another server of this machine
    look = (
        f"test -e {tmp_path} && echo SEEN > disk; ps axo comm= | sort -u > processes;"
        " curl -s $AGENTRL_GATEWAY/healthz -o /dev/null -w '%{http_code}' > healthy;"
        " curl -s $OPENAI_BASE_URL/rew%61rds -d '{}' -w '%{http_code}' > rewarded;"
        f" curl -sm 2 127.0.0.1:{listener.getsockname()[1]} || echo none > network"
    )
    attempt = attempt_of(
        commands, look, hidden=str(tmp_path / "hidden"), test="sh check.sh", sandbox=True
    )
    assert commands.values(attempt) == [1.0], attempt.error
    shown = notes_of(commands, attempt)["diff"]
    listener.close()
    assert not [word for word in ("SEEN", "check.sh", "pytest") if word in shown]
    assert not [word for word in ("+200", "+403", "+none") if word not in shown]


def test_links_that_an_agent_left_are_replaced_and_never_followed(tmp_path: Path) -> None:
    elsewhere, work = tmp_path / "elsewhere", tmp_path / "work"
    elsewhere.mkdir()
    work.mkdir()
    (elsewhere / "check.py").write_text("mine")
    (work / "tests").symlink_to(elsewhere)
    (work / "check.py").symlink_to(elsewhere / "check.py")
    workspace.put({"tests/check.py": "theirs", "check.py": "theirs"}, work)
    assert (elsewhere / "check.py").read_text() == "mine"
    assert (work / "tests/check.py").read_text() == (work / "check.py").read_text() == "theirs"


def test_what_the_agent_made_read_only_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/check.py").write_text("mine")
    (tmp_path / "tests").chmod(0o555)
    if os.geteuid() == 0:  # whom no mode keeps from writing
        tried = iter([True, False])
        real = Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if next(tried, False):
                raise PermissionError(13, "as another user", str(path))
            real(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
    workspace.put({"tests/check.py": "theirs"}, tmp_path)
    assert (tmp_path / "tests/check.py").read_text() == "theirs"
    assert (tmp_path / "tests").stat().st_mode & 0o200


def test_zip_archives_keep_executable_bits_and_broken_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def unpacked(name: str) -> Path:
        given = {"instruction": "-", "test": "true", "repository": str(tmp_path / name)}
        return workspace.original(parse_task(given), tmp_path)

    script, link = zipfile.ZipInfo("run.sh"), zipfile.ZipInfo("link")
    script.external_attr, link.external_attr = 0o100755 << 16, 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as archive:
        archive.writestr(script, "echo 1/1")
        archive.writestr("a.txt", "one")
    assert os.access(unpacked("good.zip") / "run.sh", os.X_OK)
    assert not os.access(unpacked("good.zip") / "a.txt", os.X_OK)
    with zipfile.ZipFile(tmp_path / "links.zip", "w") as archive:
        archive.writestr(link, "run.sh")
    with pytest.raises(ValueError, match=r"cannot unpack .*links.zip.*: link is a link"):
        unpacked("links.zip")
    (tmp_path / "a.bin").write_bytes(os.urandom(200_000))
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.bin", "a.bin")
    half = (tmp_path / "whole.tar.gz").read_bytes()[:100_000]
    (tmp_path / "half.tar.gz").write_bytes(half)
    with pytest.raises(ValueError, match=r"cannot unpack .*half\.tar\.gz"):
        unpacked("half.tar.gz")


def test_archives_and_git_commits_are_unpacked_once_without_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "project"
    source.mkdir()
    (source / "a.txt").write_text("one")
    with tarfile.open(tmp_path / "project.tar.gz", "w:gz") as archive:
        archive.add(source, "project")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "first"]):
        subprocess.run([*git, *command], check=True)
    (source / "a.txt").write_text("two")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    given = {"instruction": "-", "test": "true"}
    for repository in ({"repository": str(tmp_path / "project.tar.gz")},
                       {"repository": f"file://{source}", "ref": "first"}):  # fmt: skip
        task = parse_task(given | repository)
        base = workspace.original(task, tmp_path)
        assert [path.name for path in base.iterdir()] == ["a.txt"]
        assert (base / "a.txt").read_text() == "one"
        assert workspace.original(task, tmp_path) == base
    with pytest.raises(ValueError, match="ref: is for git URLs"):  # whose files would be HEAD's
        workspace.original(
            parse_task(given | {"repository": str(source), "ref": "first"}), tmp_path
        )
    with pytest.raises(ValueError, match="repository: cannot fetch"):
        workspace.original(parse_task(given | {"repository": "file:///nowhere"}), tmp_path)
    with pytest.raises(ValueError, match="is no folder, archive or git URL"):
        workspace.original(parse_task(given | {"repository": "nowhere"}), tmp_path)


JUNIT = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>'


@pytest.mark.parametrize(
    ("report", "printed", "code", "counted"),
    [
        (JUNIT, "9/9", 1, (2, 4)),
        ('<testsuite tests="0"/>', "", 5, (0, 1)),
        ("no xml", "1/4\nand then\n 3/4 \n", 0, (3, 4)),
        (None, "9/3\n", 0, (3, 3)),
        ('<testsuite tests="1" failures="-999"/>', "", 1, (0, 1)),
        ('<testsuite tests="2" skipped="-5"/>', "1/2", 1, (1, 2)),
        (f'<testsuite tests="{"9" * 400}"/>', "", 1, (0, 1)),
        (None, f"{'9' * 5000}/{'9' * 5000}\n", 1, (0, 1)),
        (None, "done on 3/4 of it", 0, (1, 1)),
        (None, "0/0\n", 1, (0, 1)),
    ],
)
def test_passed_tests_are_counted(
    tmp_path: Path, report: str | None, printed: str, code: int, counted: tuple[int, int]
) -> None:
    file = tmp_path / "junit.xml"
    if report is not None:
        file.write_text(report)
    assert score(file, printed, code) == counted
    assert rewards(*counted, {}, changed=True) == {"tests": counted[0] / counted[1]}


def test_a_report_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "junit.xml")
    assert score(tmp_path / "junit.xml", "", 0) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"instruction": 3}, "instruction: a task with tests needs a text"),
        ({"test": " "}, "test: a task with tests needs a text"),
        ({"hidden": "no-such-folder"}, "hidden: there is no folder 'no-such-folder'"),
        ({"hidden": {"../x": ""}}, "hidden: '../x' must be a path inside"),
        ({"repository": {}}, "repository: give a path, or files"),
        ({"limits": {"hours": 1}}, "limits: give an object of seconds"),
        ({"limits": {"seconds": 0}}, "limits.seconds: give a number above 0"),
        ({"limits": {"network": 1}}, "limits.network: give true or false"),
        ({"shaping": {"speed": 1}}, "shaping: give an object"),
        ({"shaping": {"all": "much"}}, "shaping.all: give a number"),
        ({"sandbox": "no"}, "sandbox: give true or false"),
        ({"ref": 1}, "ref: give a commit"),
    ],
)
def test_a_wrong_task_is_refused_with_its_key(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_task({**TASK, **wrong})
