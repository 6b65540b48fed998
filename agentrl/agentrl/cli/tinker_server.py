"""``agentrl tinker-server``: serve Tinker's protocol on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl.interrupts import end_in_order


def tinker_server_command(
    *models: str, folder: Path = Path("runs/tinker"), host: str = "127.0.0.1", port: int = 8787
) -> None:
    """Run scripts for Tinker's SDK on this machine: serve its protocol. Every key is accepted.

    Args:
        models: Base models that the server lists; clients may request others too.
        folder: Folder for training states and sampler weights.
        host: Address to listen on.
        port: Port to listen on.
    """
    import torch
    import uvicorn

    try:
        from agentrl.tinker_server import create_app
    except ImportError as error:
        raise ConfigError(
            f"tinker-server needs Tinker's SDK: pip install 'tinker>=0.38,<1' ({error})"
        ) from error

    torch.set_num_threads(1)  # training and sampling threads share the cores
    print_line(
        f"Run your scripts with\n\nTINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-local\n"
    )
    app = create_app(folder, list(models) or ["agentrl-tiny"])
    end_in_order()
    with contextlib.suppress(KeyboardInterrupt):  # told to stop, a server has done its work
        uvicorn.run(app, host=host, port=port, log_level="warning")
