"""What goes into the clients and what comes out: Tinker's names and shapes, plain values.

Knows numpy. Arrays may be given as lists, numpy arrays, torch tensors, or anything else with
``numpy()`` or ``tolist()`` (Tinker's own TensorData among them); numpy arrays and lists come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl_trainer.learner.loss_options import AdamParams as AdamParams

Array: TypeAlias = Any
"""A list of numbers, a numpy array or a torch tensor."""

StopReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens that a model reads."""

    chunks: Sequence[EncodedTextChunk]

    @classmethod
    def from_ints(cls, tokens: Array) -> ModelInput:
        return cls([EncodedTextChunk(whole_numbers(tokens, "tokens"))])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls([])

    def to_ints(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.tokens]

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([token]))

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Datum:
    """One row to learn from.

    ``model_input`` are the T tokens that are read; ``loss_fn_inputs["target_tokens"]`` the T tokens
    that they predict, which is the same row moved by one: of a row ``x``, ``x[:-1]`` and ``x[1:]``.
    The others run parallel to the targets, [T] each:

        weights     cross_entropy: of each target's log-prob; default 1
        logprobs    losses of reinforcement learning: the sampler's log-prob; 0 where none sampled
        advantages  the same losses: of each target; 0 where nothing is to be learned
        mask        which targets count, as 1 or true. Where it is off nothing is computed, and the
                    log-prob that comes back is 0. By default the targets with an advantage or a
                    sampler's log-prob; for cross_entropy and ``forward`` all of them
        proximal, reference   log-probs of other policies, see ``losses.Loss``
        length_weights        of each target's term in any loss: ``losses.Loss``'s ``weights``
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Array] = field(default_factory=dict[str, Array])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    ``stop``: None ends at the model's own end tokens; token ids replace them; strings come on top
    of them; an empty list samples until ``max_tokens``. ``max_tokens`` None: as many as the context
    has room for. ``top_k`` -1 keeps all tokens.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """``tokens`` with the stop token, if one ended it, and the log-prob of each."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    """If asked for: the likeliest tokens at each position, (id, log-prob), best first."""

    @property
    def tokens_np(self) -> NDArray[np.int32]:
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> NDArray[np.float32]:
        return np.asarray(self.logprobs, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class SampleResponse:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """If asked for: of each token of the prompt; None for the first, which nothing precedes."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Of Tinker, if asked for; this and what follows. Locally it is refused."""
    target_prompt_logprobs: Any = None
    prompt_alt_tokens: Any = None


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    loss_fn_outputs: list[dict[str, NDArray[np.float32]]]
    """For each datum ``{"logprobs": [T]}``, aligned with its target tokens."""
    metrics: dict[str, float]
    """Each named ``what:how it adds up``: ``loss:sum``, ``entropy:mean``, ``ratio:max`` ... The
    entropy is an estimate: minus the mean log-prob of the sampled tokens."""
    stats: Any = None
    """The local backend's ``learner.StepStats``; None from another."""
    loss_fn_output_type: str = "logprobs"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    metrics: dict[str, float]
    """``grad_norm`` before clipping, and ``skipped_non_finite`` 1 where nothing was changed."""


@dataclass(frozen=True, slots=True)
class SavedPath:
    """Where weights were saved: a folder of the local backend, ``tinker://...`` of the other."""

    path: str


@dataclass(frozen=True, slots=True)
class ModelData:
    arch: str
    model_name: str
    tokenizer_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool = True
    lora_rank: int | None = None


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """What is not known beforehand is None."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]


# ---- what is asked of a backend beside the work itself


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """What to train; ``alpha`` and ``targets`` are the local backend's own."""

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool | None = None
    """None: where the backend can, which locally is not."""
    alpha: float = 32.0
    targets: str | list[str] | None = None
    user_metadata: Mapping[str, str] | None = None
    optimizer: Any = None
    """Tinker's OptimizerConfig; None is AdamW, which is what the local backend has."""


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How a client is made from a saved state."""

    base_model: str | None = None
    """In place of the state's own, with which it must be compatible."""
    user_metadata: Mapping[str, str] | None = None
    weights_access_token: str | None = None
    optimizer: Any = None


@dataclass(frozen=True, slots=True)
class SaveOptions:
    ttl_seconds: int | None = None
    """When Tinker deletes what was saved. Local folders stay."""
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Of a sampling client; the first two mean something to Tinker only."""

    retry_config: Any = None
    record_stability_info: bool = False
    kind: Literal["snapshot", "inflight"] = "snapshot"


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """What ``SamplingClient.sample`` was asked for, beside the prompt. Those from
    ``topk_prompt_logprobs`` on are Tinker's."""

    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    include_prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_sample_logprobs: int = 0
    topk_prompt_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


Folder: TypeAlias = str | Path


# ---- plain arrays


def whole_numbers(values: Array, name: str) -> list[int]:
    """``values`` as a list of ints; ValueError, naming ``name``, if they are none."""
    array = as_array(values, name)
    if array.size == 0:
        return []
    if array.dtype.kind == "f" and bool(np.all(array == np.floor(array))):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be token ids, whole numbers; got {array.dtype}")
    if array.min() < 0:
        raise ValueError(f"{name} must be token ids, not negative; got {int(array.min())}")
    return array.tolist()


def numbers(values: Array, name: str) -> list[float]:
    """``values`` as a list of finite floats; ValueError, naming ``name``, if they are none."""
    array = as_array(values, name)
    if array.size == 0:
        return []
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{name} must be numbers; got {array.dtype}")
    array = array.astype(np.float64)
    if not bool(np.isfinite(array).all()):
        at = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{name}[{at}] is {array[at]}: every value must be finite")
    return array.tolist()


def as_array(values: Array, name: str) -> NDArray[Any]:
    """One-dimensional; ValueError if it is not."""
    for convert in ("detach", "cpu", "float"):  # a torch tensor, of any device and kind
        if convert == "float" and not str(getattr(values, "dtype", "")).endswith("bfloat16"):
            continue
        if hasattr(values, convert) and hasattr(values, "numpy"):
            values = getattr(values, convert)()
    if hasattr(values, "to_numpy"):  # Tinker's TensorData
        values = values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be one flat list of numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {array.shape}")
    return array
