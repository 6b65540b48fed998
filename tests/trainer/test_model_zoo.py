"""Small ones of many families against transformers' own forward, and the page about them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from model_zoo import PAGE, examined

ON_PAGE = (
    "bamba",  # anew for every token
    "deepseek_v32",  # sparse attention
    "gemma3",  # of a multimodal checkpoint, with windows
    "gpt2",  # layers of another kind
    "gpt_oss",  # sinks, experts, windows
    "jamba",  # a state space whose cache takes one token at once
    "laguna",  # names that PEFT renames
    "llama4",  # chunks
    "mistral",
    "qwen3_5",  # multimodal, linear attention
    "zamba",  # layers with weights in common
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ON_PAGE)
def test_the_page_says_what_is(kind: str) -> None:
    seen = examined(kind)
    assert seen.logprobs < 1e-5
    assert seen.gradients < 1e-5
    assert seen.row(kind) in PAGE.read_text("utf-8").splitlines(), seen


@pytest.mark.parametrize("kind", ["bert", "rembert"])
def test_models_that_look_ahead_are_refused(kind: str) -> None:
    assert "depend on tokens that come later" in examined(kind).why
    assert f"| `{kind}`" not in PAGE.read_text("utf-8")
