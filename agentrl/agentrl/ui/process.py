"""The pages beside a run: a supervised process that ends with it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from agentrl.process_privacy import hide_memory
from agentrl.supervisor import SupervisedProcess, end_with_parent
from agentrl.ui.access import kept_token
from agentrl_proxy.server.listening import bind, url_of

_PORT = 8377
_HOST = "127.0.0.1"


@contextmanager
def pages_beside(runs: Path, log: Path) -> Iterator[tuple[SupervisedProcess, str]]:
    """Serve the pages of a folder of runs on loopback; yield the process and its link.

    The caller supervises it once it forks no more.
    """
    try:
        listening = bind(_HOST, _PORT, operator_key=None)
    except OSError:  # another run's pages are there
        listening = bind(_HOST, 0, operator_key=None)
    with closing(listening):
        root = str(runs.absolute())
        process = SupervisedProcess(
            "pages",
            [sys.executable, "-m", "agentrl.ui.process", str(listening.fileno()), root],
            log,
            pass_fds=[listening.fileno()],
            grace_s=3.0,
        ).spawn()
        try:
            yield process, f"{url_of(listening)}/?token={kept_token(root)}"
        finally:
            process.stop()


def main() -> None:
    descriptor, root = sys.argv[1:]
    hide_memory()
    end_with_parent()
    os.nice(10)  # the training goes before
    with suppress(OSError):  # where Linux weighs sessions, a process's own value counts within one
        Path("/proc/self/autogroup").write_text("10")
    from agentrl.ui.app import create_app, serve

    serve(create_app(Path(root)), socket.socket(fileno=int(descriptor)), kept_token(root))


if __name__ == "__main__":
    main()
