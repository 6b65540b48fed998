"""What the chat templates of model families can do, tried out on their published ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from family_templates import FAMILIES
from transformers import AutoTokenizer

from agentrl.check.template import knows_tools, rewritten_turns, template_findings
from agentrl.findings import Thinking
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.tiny import MODEL_DIR

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def renderer(tokenizer: Any, family: str) -> Renderer:
    return Renderer(FAMILIES[family].tokenizer(tokenizer))


@pytest.mark.parametrize(
    ("family", "rewritten", "thinking"),
    [
        ("qwen2.5", [], (None, None)),
        ("qwen3", ["reasoning"], ("enable_thinking", True)),
        ("llama3", [], None),
        ("deepseek-v3.1", [], (None, False)),
        ("deepseek-r1", ["text", "reasoning"], (None, True)),
    ],
)
def test_families(tokenizer: Any, family: str, rewritten: list[str], thinking: Any) -> None:
    known = renderer(tokenizer, family)
    assert knows_tools(known) == (not family.startswith("deepseek"))  # theirs write none
    assert rewritten_turns(known) == rewritten
    found = Thinking.of(known)
    assert (found and (found.switch, found.by_default)) == thinking


def test_tools_that_the_model_never_sees_are_said(tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = PLAIN
    known = Renderer(tokenizer)
    assert not knows_tools(known)
    assert rewritten_turns(known) == []
    tried = (template_findings(known, None, calls_with_tools=count) for count in (0, 5))
    said = [next(findings) for findings in tried]
    assert said[0].fix == ""
    assert "in 5 calls, and the model never saw them" in said[1].fact
    assert "choose a model" in said[1].fix
