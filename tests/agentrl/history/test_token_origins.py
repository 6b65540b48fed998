"""Where prompts come from, how tokens are written, and the steps of scales."""

from __future__ import annotations

import pytest
from call_records import make

from agentrl.history.tokens import origin_of, step_of
from agentrl.history.vocabulary import Vocabularies, visible


def test_a_prompt_comes_from_the_call_that_it_shares_most_with() -> None:
    first = make("first", [1, 2], [3, 4, 9])
    edited = make("edited", [1, 2], [5, 6, 9], seq=1)
    call = make("call", [1, 2, 5, 6, 8, 7], [1], seq=2)
    origin = origin_of(call, [first, edited, make("later", call.prompt_ids, [1], seq=3), call])
    assert origin.parent is edited
    assert origin.shared == 4
    assert origin.whole  # but for the stop token, in whose place the template wrote 8
    origin = origin_of(call, [first])
    assert (origin.shared, origin.whole) == (2, False)
    assert origin_of(first, [first]).parent is None


@pytest.mark.parametrize(
    ("token", "text"),
    [(b" a", " a"), (b"\xc3", r"\xc3"), ("é".encode(), "é"), (b"\x1b", r"\x1b"), (b"\n", "↵")],
)
def test_a_token_is_written_so_that_each_byte_is_seen(token: bytes, text: str) -> None:
    assert visible(token) == text


def test_values_are_on_the_steps_between_the_bounds() -> None:
    assert [step_of("sampler", value) for value in (-9, -4, -0.3, -0.001)] == [0, 1, 4, 6]
    assert [step_of("advantage", value) for value in (-2, 0, 0.5)] == [0, 3, 5]
    assert step_of("trainer", None) is None
    assert step_of("version", 7, [3, 7]) == 1


def test_a_model_that_is_not_here_says_so() -> None:
    known = Vocabularies()
    config = {"model": {"name": "./nowhere"}}

    def wait() -> None:
        while known.of(config) is None:
            pass

    with pytest.raises(ValueError, match=r"no folder './nowhere'"):
        wait()
