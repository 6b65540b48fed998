"""A text that has too many tokens is refused by some of them."""

from __future__ import annotations

import pytest

from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.prompt_length import exceeds
from agentrl_proxy.rendering.renderer import Renderer

TEXTS = {
    "words": "The quick brown fox, 42 years old, doesn't jump.\n\n  It\tsleeps. " * 400,
    "one letter": "a" * 20_000,
    "spaces": " " * 20_000,
    "line ends": "\n" * 20_000,
    "special tokens": "<|im_end|>" * 2_000,
    "characters of three bytes": "\u4e2d\u6587" * 6_000,
    "combining marks": "e\u0301\u0323 \u1112\u1161\u11ab" * 3_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_that_fits_is_refused(renderer: Renderer, text: str) -> None:
    backend = renderer.tokenizer.backend_tokenizer

    def count(piece: str) -> int:
        return len(backend.encode(piece, add_special_tokens=False).ids)

    text *= 6  # several pieces
    whole = count(text)
    for limit in (1, whole // 3, whole - 1, whole, whole + 1):
        assert limit < whole or not exceeds(text, limit, count)
    assert exceeds(text, 1, count)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_long_texts_have_the_same_tokens(renderer: Renderer, text: str) -> None:
    backend = renderer.tokenizer.backend_tokenizer
    assert renderer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert renderer.encode(text, 10**6) == renderer.encode(text)


def test_a_text_that_is_much_too_long_is_not_tokenized(renderer: Renderer) -> None:
    """Only some pieces of it. Whole it takes seconds."""
    backend, counted = renderer.tokenizer.backend_tokenizer, list[int]()

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(backend.encode(piece, add_special_tokens=False).ids)

    text = TEXTS["words"] * 200
    assert exceeds(text, 2048, count)
    assert sum(counted) < 150_000 < len(text)
    with pytest.raises(ApiError, match="at least") as raised:
        renderer.encode(text, 2048)
    assert raised.value.code == "context_length_exceeded"
