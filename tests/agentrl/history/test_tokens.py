"""Where prompts come from, where sequences part, and how tokens are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from call_records import make

from agentrl.history.rollout.tokens import origin_of, shared_length
from agentrl.history.rollout.vocabulary import Vocabularies, visible


def test_a_prompt_comes_from_the_call_that_it_shares_most_with() -> None:
    first = make("first", [1, 2], [3, 4, 9])
    edited = make("edited", [1, 2], [5, 6, 9], seq=1)
    call = make("call", [1, 2, 5, 6, 8, 7], [1], seq=2)
    later = make("later", call.prompt_ids, [1], seq=3)
    assert origin_of(call, [first, edited, later, call]) == (edited, 4)
    assert origin_of(call, [first]) == (first, 2)
    assert origin_of(first, [first]) == (None, 0)


def test_sequences_share_their_beginning() -> None:
    assert shared_length([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7], [1, 2, 3]]) == 2
    assert shared_length([[1, 2], [1, 2, 3]]) == shared_length([[1, 2]]) == 2
    assert shared_length([]) == shared_length([[], [1]]) == 0


@pytest.mark.parametrize(
    ("token", "text"),
    [(b" a", " a"), (b"\xc3", r"\xc3"), ("é".encode(), "é"), (b"\x1b", r"\x1b"), (b"\n", "↵")],
)
def test_a_token_is_written_so_that_each_byte_is_seen(token: bytes, text: str) -> None:
    assert visible(token) == text


def test_without_a_model_ids_stand_for_texts_and_it_says_why() -> None:
    known = Vocabularies()
    while (vocabulary := known.of({"model": {"name": "./nowhere"}})).is_loading:
        pass
    assert "no folder './nowhere'" in vocabulary.fault
    assert vocabulary.text([1, 2]) == " 1 2"
    assert vocabulary.bytes_of(3) == b"[3]"


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for name, text in (("config.json", "{}"), ("tokenizer.json", "version https://git-lfs")):
        (tmp_path / name).write_text(text)
    known = Vocabularies()
    while (vocabulary := known.of({"model": {"name": str(tmp_path)}})).is_loading:
        pass
    assert vocabulary.fault
