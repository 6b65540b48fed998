"""Tell that a text has more tokens than a context holds, without tokenizing all of it.

Knows what tokenizers do with bytes. Never says so of a text that fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_ORDINARY = 8  # characters a token: a text with fewer is tokenized whole, which takes no longer
_PIECE = 64 * 1024
_SEARCHED = 1024  # a piece ends at a space, if there is one among so many of its last characters
_MARGIN = 9 / 8
"""Pieces that are tokenized apart have a few tokens more than the whole, at each cut. Only a count
that is larger by this factor is one that the whole exceeds as well."""
_NFC_SHRINKS = 3  # at most: three bytes to one (U+1FEF), nine to three (Hangul)


def longest_token(backend: Any) -> int | None:
    """Return how many bytes of a text one token can stand for; None: any number.

    A token stands for its own bytes, unless the tokenizer drops text or makes one unknown token of
    it, as WordPiece does.

    Args:
        backend: a tokenizer of the library ``tokenizers``.
    """
    from tokenizers import models, pre_tokenizers

    steps = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    byte_level = any(one["type"] == "ByteLevel" for one in steps[1])
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    if byte_level:
        single = pre_tokenizers.ByteLevel.alphabet()
    model, vocab = backend.model, backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().values()
    if (
        not isinstance(model, models.BPE)
        or not (byte_level or model.byte_fallback)
        or not all(one in vocab for one in single)
        or any(one.lstrip or one.rstrip for one in added)  # it takes in any whitespace
        or not all(_keeps_text(one) for one in [*steps[0], *steps[1]])
    ):
        return None
    own = max(len(one) if byte_level else len(one.encode()) for one in vocab)
    longest = max([own, *(len(one.content.encode()) for one in added)])
    return longest * (_NFC_SHRINKS if any(one["type"] == "NFC" for one in steps[0]) else 1)


def exceeds(text: str, limit: int, longest: int | None, count: Callable[[str], int]) -> int | None:
    """Return a number of tokens above ``limit`` that the text has at least; None: it may fit.

    Args:
        longest: as ``longest_token`` says.
        count: returns how many tokens a text has.
    """
    if longest is not None:
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if (least := -(-size // longest)) > limit:
            return least
    if len(text) <= limit * _ORDINARY:
        return None
    counted, start = 0, 0
    while start < len(text):
        end = start + _PIECE
        space = text.rfind(" ", end - _SEARCHED, end)
        end = space if space > 0 and end < len(text) else end
        counted += count(text[start:end])
        if counted > limit * _MARGIN:
            return limit + 1
        start = end
    return None


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("normalizers") or state.get("pretokenizers") or [state]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step leaves every byte of the text in it, or composes characters (NFC)."""
    match step["type"]:
        case "NFC" | "ByteLevel" | "Digits" | "Metaspace" | "Prepend":
            return True
        case "Split":
            return step["behavior"] != "Removed"
        case "Replace":
            replaced = step["pattern"].get("String")
            return replaced is not None and len(step["content"]) >= len(replaced)
        case _:
            return False
