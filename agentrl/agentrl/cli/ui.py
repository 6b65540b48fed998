"""``agentrl ui``: serve the pages about a folder of runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl_proxy.server.listening import bind, is_loopback, url_of


def ui_command(
    folder: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
    *,
    port: Annotated[int, Parameter(help="Port; 0 takes a free one.")] = 8377,
    host: Annotated[
        str, Parameter(help="Address to listen on; any but loopback needs --operator-key.")
    ] = "127.0.0.1",
    operator_key: Annotated[
        str | None, Parameter(help="What the link carries instead of a token made here.")
    ] = None,
) -> None:
    """Show runs in a browser: curves, rollouts, conversations and their tokens."""
    from agentrl.ui.access import kept_token
    from agentrl.ui.app import create_app, serve

    try:
        listening = bind(host, port, operator_key=operator_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"host/port: {error}") from error
    with contextlib.closing(listening):
        token = operator_key or kept_token(folder)
        link = f"{url_of(listening)}/"
        print_line(f"{link}?token={token}" if is_loopback(host) else link)
        serve(create_app(folder), listening, token)
