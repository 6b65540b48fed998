"""The first signal ends a command in order, a second one at once, and none with a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_gateway import until

HANDLED = """
import signal, sys, time
from agentrl.interrupts import Interrupted, end_in_order, handle_signals
handle_signals()
"""
IN_ORDER = f"""{HANDLED}
end_in_order(lambda: "continue it", within_s=float(sys.argv[1]))
try:
    print("ready", flush=True)
    time.sleep(30)
finally:
    print("stopping", flush=True)
    time.sleep(float(sys.argv[2]))
"""
HELD = f"""{HANDLED}
import os
from agentrl.interrupts import hold_first_signal
end_in_order()
try:
    with hold_first_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        print("held", flush=True)
except Interrupted as ended:
    sys.exit(ended.code)
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_it_imports_a_command_ends_with_one_line(number: signal.Signals) -> None:
    process = started("-m", "agentrl", "runs", "list")
    status = Path(f"/proc/{process.pid}/status")

    def handles() -> bool:
        [caught] = [line for line in status.read_text().splitlines() if line.startswith("SigCgt")]
        return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))

    until(handles, 20)
    process.send_signal(number)
    said, problems = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert (said, problems.strip()) == ("", f"ended by {number.name}")


def interrupted(
    within_s: float, stops_s: float, signals: int, apart_s: float = 0.2
) -> tuple[int, str, float]:
    process = started("-c", IN_ORDER, str(within_s), str(stops_s))
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(apart_s)
    _, problems = process.communicate(timeout=20)
    return process.returncode, problems, time.monotonic() - began


def test_a_held_signal_is_raised_at_the_end_of_the_block() -> None:
    process = started("-c", HELD)
    assert (process.communicate(timeout=20), process.returncode) == (("held\n", ""), 143)


def test_a_second_signal_ends_at_once() -> None:
    code, said, seconds = interrupted(within_s=20, stops_s=20, signals=2, apart_s=1.2)
    assert code == 143
    assert said.split("\n")[1:] == ["ended by SIGTERM at once", "continue it", ""]
    assert seconds < 5


def test_a_signal_that_is_passed_on_is_one_signal() -> None:
    code, said, seconds = interrupted(within_s=20, stops_s=2, signals=3)
    assert code == 1  # as of any exception: no caller catches it here
    assert said.rstrip().endswith("Interrupted: SIGTERM")
    assert seconds > 1.9


def test_what_cannot_be_stopped_in_time_is_left() -> None:
    code, said, seconds = interrupted(within_s=0.5, stops_s=20, signals=1)
    assert code == 143, said
    assert "not everything could be stopped in 0 s\ncontinue it" in said
    assert seconds < 5


def test_a_signal_that_the_caller_has_ignored_stays_ignored() -> None:
    """As of a command that a script starts in the background."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN){HANDLED}"
    code += "signal.raise_signal(signal.SIGINT); print('lives')"
    assert started("-c", code).communicate(timeout=20)[0] == "lives\n"
