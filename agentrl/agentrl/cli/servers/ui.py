"""``agentrl ui``: serve the pages about a folder of runs and PostgreSQL stores."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter
from cyclopts.validators import Number

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import store_url, without_password
from agentrl.console.output import print_line
from agentrl_proxy.server.listening import bind, is_loopback, url_of
from agentrl_tracer.store import Store

_SHORTEST_KEY = 16
_PATIENCE_S = 10.0


def ui_command(
    runs: Annotated[str, Parameter(help="Folder of run folders, or a PostgreSQL URL.")] = "runs",
    *,
    store: Annotated[
        str | None,
        Parameter(
            help="PostgreSQL URL: the runs of that store, too. os.environ/NAME stands for a "
            "password in the environment."
        ),
    ] = None,
    port: Annotated[
        int, Parameter(help="Port; 0 takes a free one.", validator=Number(gte=0, lte=65535))
    ] = 8377,
    host: Annotated[
        str, Parameter(help="Address to listen on; any but loopback needs --operator-key.")
    ] = "127.0.0.1",
    operator_key: Annotated[
        str | None, Parameter(help="What the link carries instead of a token made here.")
    ] = None,
) -> None:
    """Show runs in a browser: curves, rollouts, conversations and their tokens."""
    from agentrl.history.sources import cache_folder
    from agentrl.ui.access import kept_token
    from agentrl.ui.app import create_app, serve

    if operator_key is not None and len(operator_key) < _SHORTEST_KEY:
        raise ConfigError(f"operator_key: must have at least {_SHORTEST_KEY} characters")
    stores = [url for url in (runs, store) if url and "://" in url]
    for url in stores:
        if not url.startswith(("postgres://", "postgresql://", "postgresql+")):
            raise ConfigError("store: must be a URL like postgresql://user@host/database")
        Store(store_url(url), patience_s=_PATIENCE_S).close()  # says at once what is wrong
    shown = without_password(runs) if "://" in runs else str(Path(runs).absolute())
    folder = cache_folder(shown) if "://" in runs else Path(runs)
    if not stores and not folder.is_dir():
        raise ConfigError(f"runs: there is no folder {runs!r}; `agentrl train` makes one of runs")
    try:
        listening = bind(host, port, operator_key=operator_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"host/port: {error}") from error
    with contextlib.closing(listening):
        token = operator_key or kept_token(shown)
        link = f"{url_of(listening)}/"
        print_line(f"{link}?token={quote(token)}" if is_loopback(host) else link)
        serve(create_app(folder, stores), listening, token)
