"""Stop strings, and how much of several prompts is computed at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentrl_trainer.inference.sequences import Prefill, StopStrings, chunk_sizes
from agentrl_trainer.models.prefix_attention import common_prefix


@pytest.mark.parametrize("slow", [False, True])
def test_stop_strings(slow) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("aé€b. STOP it", add_special_tokens=False)
    for stop, expected in (
        (("STOP",), ("STOP", "aé€b. STOP")),
        (("€",), ("€", "aé€")),
        (("it", ". "), (". ", "aé€b. ")),
        (("STOPS", "x"), None),
    ):
        watch = StopStrings(tokenizer, stop)
        if slow:
            watch._backend = None
        hit = None
        fed: list[int] = []
        while hit is None and len(fed) < len(ids):
            fed.append(ids[len(fed)])
            hit = watch.push(fed[-1])
        assert (hit and (hit, tokenizer.decode(fed))) == expected


def test_a_special_token_can_be_a_stop_string() -> None:
    watch = StopStrings(byte_tokenizer(), ("<|end|>",))
    assert watch.push(10) is None
    assert watch.push(256) == "<|end|>"


def test_bytes_that_are_no_text_do_not_end_the_search() -> None:
    """Byte tokens of Llama 2's kind: the newline, and the beginning of a character, then a word."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {"▁The": 257, "▁Final": 258, "STOP": 259}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    spaces = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    watch = StopStrings(PreTrainedTokenizerFast(tokenizer_object=backend), ("Final", "STOP"))
    said = ["▁The", "<0x0A>", "<0xE2>", "▁Final"]
    assert [watch.push(vocab[token]) for token in said] == [None, None, None, "Final"]
    assert watch.push(vocab["STOP"]) == "STOP"


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert common_prefix(a, b) == (min(len(a), len(b)) if slow is None else slow)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(16, 1024),
    st.booleans(),
)
def test_chunk_sizes_bound_the_work(given: list[tuple[int, int]], most: int, ragged: bool) -> None:
    jobs = [
        Prefill([0] * (left + held), [SimpleNamespace(admitted=-at)], held)
        for at, (left, held) in enumerate(given)
    ]
    sizes = chunk_sizes(jobs, most, ragged=ragged)
    assert all(1 <= sizes[job] <= len(job.tokens) - job.held for job in jobs)
    if not ragged:
        assert max(sizes.values()) * len(jobs) <= max(most, len(jobs))
        return
    left = sum(len(job.tokens) - job.held for job in jobs)
    assert sum(sizes.values()) == min(left, max(most, len(jobs)))
    oldest, *younger = reversed(jobs)
    whole = sizes[oldest] == len(oldest.tokens) - oldest.held
    assert whole or all(sizes[job] == 1 for job in younger)


def test_nothing_to_compute_has_no_chunks() -> None:
    assert chunk_sizes([], 512, ragged=False) == chunk_sizes([], 512, ragged=True) == {}
