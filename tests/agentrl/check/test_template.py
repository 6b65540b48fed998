"""What the chat templates of model families can do, tried out on their published ones."""

from __future__ import annotations

from typing import Any

import pytest
from family_templates import FAMILIES
from transformers import AutoTokenizer

from agentrl.check.template import knows_tools, rewritten_turns
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.tiny import MODEL_DIR

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def renderer(tokenizer: Any, family: str) -> Renderer:
    return Renderer(FAMILIES[family].tokenizer(tokenizer))


@pytest.mark.parametrize(
    ("family", "tools", "rewritten"),
    [
        ("qwen2.5", True, []),
        ("qwen3", True, ["reasoning"]),
        ("llama3", True, []),
    ],
)
def test_families(tokenizer: Any, family: str, tools: bool, rewritten: list[str]) -> None:
    known = renderer(tokenizer, family)
    assert knows_tools(known) == tools
    assert rewritten_turns(known) == rewritten
