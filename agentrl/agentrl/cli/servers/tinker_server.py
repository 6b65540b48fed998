"""``agentrl tinker-server``: serve Tinker's protocol on this machine."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl.interrupts import begin_end, end_in_order
from agentrl_proxy.server.listening import bind, is_loopback, url_of


def tinker_server_command(
    *models: str,
    folder: Path = Path("runs/tinker"),
    host: str = "127.0.0.1",
    port: int = 8787,
    api_key: Annotated[str | None, Parameter(env_var="AGENTRL_TINKER_SERVER_KEY")] = None,
    allowed_host: list[str] | None = None,
) -> None:
    """Run scripts for Tinker's SDK on this machine: serve its protocol.

    Args:
        models: Base models that the server lists; clients may request others too.
        folder: Folder for training states and sampler weights.
        host: Address to listen on.
        port: Port to listen on.
        api_key: The key that clients must send, which begins with tml-. Other processes see flags:
            better set AGENTRL_TINKER_SERVER_KEY. Without one: loopback only, every key accepted.
        allowed_host: Name by which clients may address the server, besides its address.
    """
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"host: anyone who reaches {host!r} could train and sample; set the key that clients "
            "must send in AGENTRL_TINKER_SERVER_KEY, or listen on 127.0.0.1"
        )
    if api_key is not None and (not api_key.startswith("tml-") or len(api_key) < 16):
        raise ConfigError(
            "api_key: must begin with tml-, which Tinker's SDK asks for, and have 16 characters"
        )
    import torch
    import uvicorn

    try:
        from agentrl.tinker_server import create_app
    except ImportError as error:
        raise ConfigError(
            f"tinker-server needs Tinker's SDK: pip install 'tinker>=0.38,<1' ({error})"
        ) from error

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # else the first state that is saved says so
        pass
    try:
        sock = bind(host, port, operator_key=api_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"host/port: {error}") from error
    torch.set_num_threads(1)  # until a model's size is known
    url = url_of(sock)
    key = "tml-local" if api_key is None else "$AGENTRL_TINKER_SERVER_KEY"
    print_line(f"Run your scripts with\n\nTINKER_BASE_URL={url} TINKER_API_KEY={key}\n")
    app = create_app(
        folder,
        list(models) or ["agentrl-tiny"],
        api_key=api_key,
        host=host,
        allowed_hosts=allowed_host or (),
    )

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            begin_end(sig)
            self.should_exit = True

    config = uvicorn.Config(app, log_level="warning")
    end_in_order()
    with contextlib.suppress(KeyboardInterrupt):  # told to stop, a server has done its work
        Server(config).run(sockets=[sock])
