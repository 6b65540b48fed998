"""What is printed can be read and copied: in a pipe, and in a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest

from agentrl.console.output import print_json
from agentrl.runs.excerpts import excerpt

COLUMNS = 80
PATH = f"/home/someone/{'a-folder-with-a-long-name/' * 5}run"
PROGRAM = """
import logging, os, sys
from agentrl.cli.main import main
from agentrl.console.live import TrainDisplay
from agentrl.console.output import console

sys.argv = ["agentrl", "runs", "show", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
with TrainDisplay(console, "run", since=0.0) as display:
    display.note("3 attempts failed, the first with [/b] in its output: " + sys.argv[3])
    log = logging.getLogger("agentrl")
    log.warning("the gateway ended with code -9; its log is %s", sys.argv[3])
    try:
        eval(compile("1 / 0" + " " * 30 + "# end of the line", sys.argv[3], "eval"))
    except ZeroDivisionError:
        log.exception("the agent failed")
"""


def run_in_terminal(command: list[str]) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS)}
    printed = bytearray()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                printed += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()).replace("\r", "\n")


def run_piped(command: list[str]) -> str:
    env = {**os.environ, "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, env=env
    )
    return done.stdout


@pytest.mark.parametrize("run", [run_piped, run_in_terminal])
def test_errors_notes_logs_and_tracebacks_are_whole(run: Callable[[list[str]], str]) -> None:
    said = run([sys.executable, "-c", PROGRAM, PATH])
    lines = said.splitlines()
    assert "code 2" in lines
    # The error, the note, the warning and the traceback each have the path in one piece.
    assert said.count(PATH) == 4, said
    assert f'  File "{PATH}", line 1, in <module>' in lines
    assert any(re.match(r"[\d :,-]+ WARNING the gateway ended with code -9;", one) for one in lines)
    assert "[/b]" in said
    wide = [line for line in lines if len(line) > COLUMNS]
    if run is run_piped:
        assert f"error: run: {PATH!r} is no run folder: it does not exist" in wide
        assert not any(mark in said for mark in "╭│╰")
        assert not any(line.endswith(" ") for line in lines)
    else:  # sentences wrap between words: only a path is wider than the terminal
        assert all(PATH in line for line in wide)
        assert all(len(line) <= len(PATH) + 30 for line in wide)


def test_lone_surrogates_of_agents_are_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    print_json({"said": "a\ud800b"})
    assert capfd.readouterr().out == '{"said": "a?b"}\n'
    assert excerpt("a\udfffb") == "a\ufffdb"
