"""The command line: its help is one screen, and mistakes are explained without a traceback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentrl.cli import main as command_line
from agentrl.cli.main import main
from agentrl.cli.tasks import read_tasks
from agentrl.config.commands import COMMANDS, TrainConfig
from agentrl.config.errors import no_run_folder
from agentrl.config.setting_names import settings_of
from agentrl.config.settings.agent import AgentSettings
from agentrl.console import output
from agentrl.training.session import RunError
from agentrl_trainer.distributed.plan import RankError

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process: returns the exit code, and what was printed."""

    def run(*arguments: str, width: int = 200) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
        for console in (output.console, output.stderr):
            monkeypatch.setattr(console, "_width", width)
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, "".join(capsys.readouterr())

    return run


def test_the_commands_with_settings_are_known_before_these_are_imported() -> None:
    assert command_line._COMMANDS.keys() == COMMANDS.keys()


def test_help_is_one_screen_and_everything_is_behind_help_all(cli: Cli) -> None:
    code, shown = cli("train", "--help", width=100)
    assert code == 0
    assert len(shown.splitlines()) <= 50
    assert "…" not in shown
    said = " ".join(shown.split())
    for part in (
        "Training runs on this machine", "--backend tinker", "docs/client.md", "--help-all",
        "--batch-size [16] Tasks per step.",
    ):  # fmt: skip
        assert part in said
    assert (Path(__file__).parents[3] / "docs" / "client.md").is_file()
    _, every = cli("train", "--help-all")
    assert all(flag in every for setting in settings_of(TrainConfig) for flag in setting.flags[:1])
    assert "TINKER_API_KEY" in every


def test_shells_complete_commands_and_flags() -> None:
    script = command_line.app.generate_completion(shell="bash")
    assert all(word in script for word in ("tinker-server", "rollouts", "--where", "parquet"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train nowhere.py:f --tasks t", "nowhere.py"),
        ("train json:loads --tasks no.jsonl", "tasks: cannot read 'no.jsonl'"),
        ("train json:loads", "agent.tasks: is missing"),
        ("train --tasks t", "agent.entrypoint: is missing"),
        ("train json:loads --tasks t --config x.ini", ".toml, .yaml or .yml"),
        ("train json:loads --resume nowhere", "is no run folder"),
        ("runs show nowhere", "run: 'nowhere' is no run folder"),
        ("serve --host 0.0.0.0", "operator key"),
        ("run json:loads --task [1]", "task: "),
        ("run json:loads --task {", "task: "),
        ("export", "source: is missing. A run folder"),
        ("frobnicate", "frobnicate"),
    ],
)
def test_mistakes_are_explained(cli: Cli, command: str, message: str) -> None:
    code, said = cli(*command.split())
    assert code == 2, said
    assert message in said
    assert "Traceback" not in said


def test_a_run_that_is_named_without_its_folder_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert no_run_folder(Path("first")) == "'first' is no run folder: it does not exist"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.json").write_text("{}")
    assert no_run_folder(Path("first")).endswith("; did you mean 'runs/first'?")


def test_a_misspelled_placeholder_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": 1}\n')
    read_tasks(tasks, "agent.tasks", AgentSettings(entrypoint="sh -c true {qestion} {question}"))
    said = " ".join(capsys.readouterr().out.split())
    assert said == (
        "note: agent.entrypoint: no task has a field 'qestion', so {qestion} is passed as it is "
        "(fields: question)"
    )


@pytest.mark.parametrize(
    "command",
    ["eval json:loads --tasks {}", "run json:loads --task {{}}", "train json:loads --tasks {}"],
)
def test_a_folder_that_cannot_be_written_is_no_wrong_setting(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"n": 1}\n')
    code, said = cli(*command.format(tasks).split(), "--runs", f"{tasks}/runs")
    assert code == 1, said
    assert f"runs: cannot write {tasks}/runs: Not a directory; this user must" in said


def test_windows_is_refused_with_a_sentence_that_names_wsl(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    code, said = cli("runs", "list")
    assert code == 2
    assert "WSL" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ui", "nowhere"], "error: runs: there is no folder 'nowhere'"),
        (["ui", ".", "--port", "99999"], "Must be <= 65535"),
        (["runs", "rollouts", "runs/any", "--limit", "-3"], "Must be >= 0"),
    ],
)
def test_what_no_command_can_do_is_refused_in_a_sentence(
    cli: Cli, arguments: list[str], said: str
) -> None:
    code, shown = cli(*arguments)
    assert code == 2
    assert said in shown
    assert "Traceback" not in shown


def test_a_port_in_use_is_named_with_a_way_out(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, shown = cli("ui", str(tmp_path), "--port", str(port))
    assert f"error: host/port: 127.0.0.1:{port} is in use; port 0 takes a free one" in shown


CUDA = "CUDA out of memory. Tried to allocate 454.00 MiB. GPU 0 has a total capacity of 79 GiB."
MPS = "MPS backend out of memory (MPS allocated: 5.4 GB, max: 18.1 GB). Tried to allocate 1.2 GB."


@pytest.mark.parametrize(
    ("error", "cause", "short"),
    [
        (torch.OutOfMemoryError(CUDA), None, "CUDA out of memory. Tried to allocate 454.00 MiB."),
        (RuntimeError(MPS), None, "MPS backend out of memory. Tried to allocate 1.2 GB."),
        (
            RunError(f"local: rank 1 of 2 ended: OutOfMemoryError: {CUDA}\nContinue."),
            RankError(),
            "rank 1 of 2 ended: CUDA out of memory. Tried to allocate 454.00 MiB. Continue.",
        ),
    ],
)
def test_too_little_memory_of_a_device_is_said_with_what_to_lower(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None, short: str
) -> None:
    """A CPU raises another error, so a command stands in for a training on a GPU."""

    def command(*_: object, **__: object) -> None:
        raise error from cause

    monkeypatch.setattr(command_line, "app", command)
    code, shown = cli("train", "agent.py")
    assert code == 1
    said = " ".join(shown.split())
    assert f"{short} Lower learning.micro_batch_tokens" in said
    assert "total capacity" not in said


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (torch.empty, "can't allocate memory: you tried to allocate 4503599627370496 bytes."),
        (bytearray, "MemoryError."),
    ],
)
def test_a_cpu_without_memory_is_said_with_what_to_lower(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, allocate: Callable[[int], object], said: str
) -> None:
    monkeypatch.setattr(command_line, "app", lambda *_, **__: allocate(2**50))
    code, shown = cli("train", "agent.py")
    assert code == 1
    assert f"error: {said} Lower learning.micro_batch_tokens" in " ".join(shown.split())
