"""What is known of each token of a call: log-probs, advantages, versions, alternatives, origins.

Joins the store's call with the file of the step that trained on it. Knows no HTML and no colors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.history.sources import OpenRun
from agentrl.history.vocabulary import Vocabulary, visible
from agentrl.runs.token_records import TrainedTokens, read_call
from agentrl_tracer.schemas import Call
from agentrl_trainer.data.skip_reasons import token_versions

LOGPROBS = (-4.0, -2.0, -1.0, -0.5, -0.1, -0.01)
DIFFERENCES = (-0.1, -0.01, -0.001, 0.001, 0.01, 0.1)
RATIOS = (0.8, 0.9, 0.99, 1.01, 1.1, 1.25)
ADVANTAGES = (-1.0, -0.3, -1e-9, 1e-9, 0.3, 1.0)
SCALES: dict[str, tuple[float, ...]] = {
    "sampler": LOGPROBS,
    "trainer": LOGPROBS,
    "difference": DIFFERENCES,
    "ratio": RATIOS,
    "advantage": ADVANTAGES,
    "version": (),
}
"""What tokens are colored by, and the bounds between the steps of each scale, ascending. Versions
have a color each."""

_Known = tuple[float | None, float | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token. ``difference`` is trainer - sampler and ``ratio`` its exponential, both at
    the temperature that the token was sampled at; None where the trainer did not see it."""

    place: int  # in the answer, from 0
    id: int
    text: str
    sampler: float
    trainer: float | None
    difference: float | None
    ratio: float | None
    advantage: float | None
    version: int  # -1: unknown
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Some tokens of a call's answer. ``names`` are the keys of ``SCALES`` that have values."""

    tokens: list[Token]
    names: list[str]
    versions: list[int]
    """All that sampled this answer, ascending."""


def call_tokens(
    run: OpenRun, call: Call, vocabulary: Vocabulary | None, start: int, count: int
) -> CallTokens:
    """Return the tokens from ``start`` on; without a vocabulary their ids stand for texts."""
    seen = None
    if call.trained_step is not None:
        seen = read_call(run.folder, call.trained_step, call.id)
        if seen is not None and len(seen.trainer) != len(call.response_ids):
            seen = None
    versions = token_versions(call)
    some = slice(start, start + count)
    columns = (
        call.response_ids[some],
        call.response_logprobs[some],
        _known(call, seen, some),
        versions[some],
        _alternatives(call, vocabulary)[some],
    )
    tokens = [
        Token(start + i, token_id, _text(vocabulary, token_id), logprob, *known, version, others)
        for i, (token_id, logprob, known, version, others) in enumerate(zip(*columns, strict=True))
    ]
    distinct = sorted({version for version in versions if version >= 0})
    left_out = {"trainer", "difference", "ratio", "advantage"} if seen is None else set[str]()
    left_out |= set() if distinct else {"version"}
    return CallTokens(tokens, [name for name in SCALES if name not in left_out], distinct)


def step_of(name: str, value: float | None, versions: Sequence[int] = ()) -> int | None:
    """Return the step of a scale that a value is on, from 0; None for no value."""
    if value is None:
        return None
    if name == "version":
        return versions.index(int(value)) if value in versions else None
    return bisect_right(SCALES[name], value)


def _known(call: Call, seen: TrainedTokens | None, some: slice) -> Iterator[_Known]:
    """Yield trainer, difference, ratio and advantage of each token."""
    if seen is None:
        yield from [(None, None, None, None)] * len(call.response_ids[some])
        return
    against = call.response_logprobs if seen.sampler is None else seen.sampler.tolist()
    columns = seen.trainer[some].tolist(), against[some], seen.advantage[some].tolist()
    for trainer, sampler, advantage in zip(*columns, strict=True):
        difference = trainer - sampler
        yield trainer, difference, math.exp(min(difference, 700.0)), advantage


def _alternatives(call: Call, vocabulary: Vocabulary | None) -> list[tuple[tuple[str, float], ...]]:
    """Return the likeliest tokens in each place, where the agent asked for them.

    Answers list them for the tokens that the agent saw, so special ones have no entry.
    """
    choices: Any = (call.response or {}).get("choices") or [{}]
    entries: Any = ((choices[0] or {}).get("logprobs") or {}).get("content") or []
    found: list[tuple[tuple[str, float], ...]] = [()] * len(call.response_ids)
    if vocabulary is None or not entries:
        return found
    at = 0
    for place, token_id in enumerate(call.response_ids):
        if at < len(entries) and bytes(entries[at].get("bytes") or ()) == vocabulary.bytes_of(
            token_id
        ):
            tops: list[Mapping[str, Any]] = entries[at].get("top_logprobs") or []
            found[place] = tuple((_said(one), float(one["logprob"])) for one in tops)
            at += 1
    return found


def _said(entry: Mapping[str, Any]) -> str:
    data = entry.get("bytes")
    return visible(bytes(data) if data else str(entry["token"]).encode())


def _text(vocabulary: Vocabulary | None, token_id: int) -> str:
    return f"[{token_id}]" if vocabulary is None else visible(vocabulary.bytes_of(token_id))


# ---- prompts


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call's prompt comes from: its first ``shared`` tokens are those of ``parent``, prompt
    and answer. ``whole``: they are all of the parent's, the answer's last token apart, because
    templates end turns in their own way."""

    parent: Call | None
    shared: int
    whole: bool


def origin_of(call: Call, earlier: Sequence[Call]) -> Origin:
    """Find the earlier call of the attempt with which a prompt begins for longest."""
    best = Origin(None, 0, whole=False)
    prompt = np.array(call.prompt_ids)
    for one in earlier:
        if one.seq >= call.seq or not one.prompt_ids:
            continue
        said = np.array(one.prompt_ids + one.response_ids)
        size = min(len(said), len(prompt))
        apart = np.flatnonzero(said[:size] != prompt[:size])
        shared = int(apart[0]) if len(apart) else size
        if shared > best.shared:
            best = Origin(one, shared, whole=shared >= len(said) - 1 > len(one.prompt_ids) - 1)
    return best
