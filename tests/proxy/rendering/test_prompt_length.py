"""A text that has too many tokens is refused by its bytes, or by some of its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.prompt_length import exceeds, longest_token
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


def bytes_of(model: Any = None, **parts: Any) -> Tokenizer:
    """A byte-level tokenizer with one token of twelve bytes."""
    vocab = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(model or models.BPE(vocab=vocab | {"a" * 12: len(vocab)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added(*tokens: AddedToken) -> Tokenizer:
    tokenizer = bytes_of()
    tokenizer.add_tokens([*tokens])
    return tokenizer


SPLIT = pre_tokenizers.Split(" ", "removed")
NOTHING_UNKNOWN = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581\u2581": 256}


@pytest.mark.parametrize(
    ("tokenizer", "longest"),
    [
        (bytes_of(), 12),
        (bytes_of(normalizer=normalizers.NFC()), 36),
        (bytes_of(normalizer=normalizers.Sequence([normalizers.NFC()])), 36),
        (with_added(AddedToken("<|a token of 20 b|>")), 19),
        (bytes_of(models.BPE(NOTHING_UNKNOWN, [], byte_fallback=True), pre_tokenizer=None), 6),
        # These drop text, or make one token of any amount of it.
        (with_added(AddedToken("<mask>", lstrip=True)), None),
        (bytes_of(normalizer=normalizers.Strip()), None),
        (bytes_of(normalizer=normalizers.Replace("ab", "a")), None),
        (bytes_of(pre_tokenizer=pre_tokenizers.Whitespace()), None),
        (
            bytes_of(pre_tokenizer=pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel()])),
            None,
        ),
        (bytes_of(models.BPE({"a": 0}, [])), None),
        (bytes_of(models.Unigram([("a", 0.0), ("<unk>", -1.0)], 1)), None),
    ],
)
def test_the_longest_token(tokenizer: Tokenizer, longest: int | None) -> None:
    assert longest_token(tokenizer) == longest


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("by_bytes", [True, False])
def test_no_text_that_fits_is_refused(renderer: Renderer, text: str, by_bytes: bool) -> None:
    backend = renderer.tokenizer.backend_tokenizer

    def count(piece: str) -> int:
        return len(backend.encode(piece, add_special_tokens=False).ids)

    whole, longest = count(text), renderer.longest_token if by_bytes else None
    for limit in (1, whole // 3, whole - 1, whole, whole + 1):
        least = exceeds(text, limit, longest, count)
        assert least is None or limit < least <= whole
    assert exceeds(text, 1, longest, count) is not None
    normalized = bytes_of(normalizer=normalizers.NFC())
    ids = normalized.encode(text, add_special_tokens=False).ids
    assert exceeds(text, len(ids), longest_token(normalized), count) is None or not by_bytes


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_long_texts_have_the_same_tokens(renderer: Renderer, text: str) -> None:
    backend = renderer.tokenizer.backend_tokenizer
    assert renderer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert renderer.encode(text, 10**6) == renderer.encode(text)


def test_a_text_that_is_much_too_long_is_not_tokenized(renderer: Renderer) -> None:
    """By its bytes at once; without a longest token after some pieces. Whole it takes seconds."""
    backend, counted = renderer.tokenizer.backend_tokenizer, list[int]()

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(backend.encode(piece, add_special_tokens=False).ids)

    text = TEXTS["words"] * 200
    assert exceeds(text, 2048, renderer.longest_token, count) is not None
    assert not counted
    assert exceeds(text, 2048, None, count) == 2049
    assert sum(counted) < 150_000 < len(text)
    with pytest.raises(ApiError, match="at least") as raised:
        renderer.encode(text, 2048)
    assert raised.value.code == "context_length_exceeded"
