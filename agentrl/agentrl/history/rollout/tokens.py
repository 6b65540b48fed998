"""What is known of each token of a call, and where token sequences part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.history.rollout.vocabulary import Vocabulary, visible
from agentrl.runs.token_records import TrainedTokens
from agentrl_tracer.schemas import Call
from agentrl_trainer.data.skip_reasons import token_versions

_LARGEST = 80.0  # of a difference, whose exponential is a float32


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Some tokens of a call's answer.

    Each of ``columns`` has a value for every token; a column that is not known is missing. They are
    the log-probs of ``sampler`` and ``trainer``, their ``ratio`` (trainer to sampler, at the
    temperature of sampling), the ``advantage``, and the adapter ``version`` (-1: unknown).
    ``alternatives`` names the likeliest tokens in each place with their log-probs, if the agent
    asked for them.
    """

    ids: list[int]
    texts: list[str]
    columns: dict[str, NDArray[Any]]
    alternatives: list[str]


def call_tokens(
    call: Call, seen: TrainedTokens | None, vocabulary: Vocabulary, some: slice
) -> CallTokens:
    """Join ``some`` tokens of the store's call with what the trainer has ``seen`` of it."""
    ids = call.response_ids[some]
    columns: dict[str, NDArray[Any]] = {"sampler": np.array(call.response_logprobs[some])}
    if seen is not None:
        against = columns["sampler"] if seen.sampler is None else seen.sampler[some]
        difference = seen.trainer[some] - against
        columns["trainer"] = seen.trainer[some]
        columns["ratio"] = np.exp(np.minimum(difference, _LARGEST))
        columns["advantage"] = seen.advantage[some]
    versions = token_versions(call)
    if max(versions, default=-1) >= 0:
        columns["version"] = np.array(versions[some])
    texts = [visible(vocabulary.bytes_of(one)) for one in ids]
    return CallTokens(ids, texts, columns, _alternatives(call, vocabulary)[some])


def _alternatives(call: Call, vocabulary: Vocabulary) -> list[str]:
    """Answers list tokens that the agent saw, so special ones have no entry."""
    choices: Any = (call.response or {}).get("choices") if call.response_ids else None
    entries: Any = (choices[0].get("logprobs") or {}).get("content") if choices else None
    found: list[str] = []
    at = 0
    for token_id in call.response_ids:
        entry = entries[at] if entries and at < len(entries) else None
        if entry is None or _bytes(entry) != vocabulary.bytes_of(token_id):
            found.append("")
            continue
        at += 1
        tops = entry.get("top_logprobs") or []
        found.append(", ".join(f"{visible(_bytes(one))!r} {one['logprob']:.3f}" for one in tops))
    return found


def _bytes(entry: dict[str, Any]) -> bytes:
    return bytes(entry.get("bytes") or ()) or str(entry["token"]).encode()


# ---- token sequences that begin alike


def origin_of(call: Call, earlier: Sequence[Call]) -> tuple[Call | None, int]:
    """Find the earlier call of the attempt whose prompt and answer a prompt begins with for
    longest, and count those tokens."""
    best: tuple[Call | None, int] = None, 0
    for one in earlier:
        if one.seq < call.seq and one.prompt_ids:
            said = one.prompt_ids + one.response_ids
            shared = shared_length([said, call.prompt_ids])
            best = (one, shared) if shared > best[1] else best
    return best


def shared_length(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> int:
    """Count the tokens at the start that all sequences have."""
    size = min(map(len, sequences), default=0)
    rows = np.array([one[:size] for one in sequences])
    apart = np.flatnonzero((rows != rows[:1]).any(axis=0))
    return int(apart[0]) if len(apart) else size
