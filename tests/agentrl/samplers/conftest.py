"""The renderer of the model that ships."""

from __future__ import annotations

import pytest
from running_gateway import WEIGHTS
from transformers import AutoTokenizer

from agentrl_proxy.rendering.renderer import Renderer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
