"""What goes into the clients and what comes out: Tinker's names and shapes, plain values.

Array arguments may be lists, numpy arrays, torch tensors or Tinker's TensorData; results hold numpy
arrays and lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import AdamParams as AdamParams
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.prepare_batch import RefusedRows as RefusedRows

Array: TypeAlias = Any
"""A list of numbers, a numpy array or a torch tensor."""

Folder: TypeAlias = str | Path

EndStatus: TypeAlias = Literal["success", "errored", "interrupted"]


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
        return cls([EncodedTextChunk(token_ids(tokens, "tokens"))])

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
    """One example to learn from.

    ``model_input`` holds the T tokens that are read, ``loss_fn_inputs["target_tokens"]`` the T
    tokens that they predict: the same sequence shifted by one. Of a sequence ``x`` they are
    ``x[:-1]`` and ``x[1:]``. The other inputs are aligned with the targets, [T] each:

        weights     for cross_entropy: of each target's log-prob; default 1
        logprobs    for losses of reinforcement learning: the sampler's log-prob; 0 for the prompt
        advantages  for the same losses: of each target; 0 where nothing is to be learned
        mask        which targets count, as 1 or true. The others are not computed, and their
                    log-probs come back as 0. Default: the targets with an advantage or a sampler's
                    log-prob; for cross_entropy and ``forward`` all of them
        proximal, reference   log-probs of other policies, see ``losses.Loss``
        length_weights        of each target's term in any loss: ``weights`` of ``losses.Loss``
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Array] = field(default_factory=dict[str, Array])


Data: TypeAlias = Sequence[Datum] | Sequence[TrainingRow]
"""What can be learned from: Tinker's datums, or the trainer's own rows."""


D = TypeVar("D", Datum, TrainingRow)
"""One of them."""


class LossCall(NamedTuple):
    """The arguments of ``TrainingClient.forward`` and ``forward_backward``."""

    data: Data
    loss_fn: str
    config: LossConfig | None = None
    normalize_by: float | None = 1.0
    logprobs: bool = True
    backward: bool = True  # False leaves the gradients as they are


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    ``stop``: None stops at the model's end tokens; token ids replace these; strings are added to
    them; an empty list samples until ``max_tokens``. ``max_tokens`` None fills the context.
    ``top_k`` -1 keeps all tokens.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One continuation: its tokens, the stop token included, and the log-prob of each."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    """If requested: the likeliest tokens at each position, (id, log-prob), best first."""

    @property
    def tokens_np(self) -> NDArray[np.int32]:
        return np.asarray(self.tokens, dtype=np.int32)

    @property
    def logprobs_np(self) -> NDArray[np.float32]:
        return np.asarray(self.logprobs, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """What was sampled. Over Tinker it is the SDK's object, which has more fields."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """If requested: the log-prob of each token of the prompt; None for the first."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    loss_fn_outputs: list[dict[str, NDArray[np.float32]]]
    """For each datum ``{"logprobs": [T]}``, aligned with its target tokens."""
    metrics: dict[str, float]
    """Named ``name:reduction``: ``loss:sum``, ``entropy:mean``, ``ratio:max`` ... The entropy is
    an estimate: minus the mean log-prob of the sampled tokens."""
    stats: Any = None
    """``learner.StepStats``; over Tinker only for the trainer's own rows."""
    loss_fn_output_type: str = "logprobs"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    metrics: dict[str, float]
    """``grad_norm`` before clipping; ``skipped_non_finite`` is 1 if nothing was changed."""


@dataclass(frozen=True, slots=True)
class SavedPath:
    """Where weights were saved: a local folder, or ``tinker://...``."""

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
    """A base model; None stands for what is not known before it is loaded."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Which adapter to train. Saved in states, so that ``create_training_client_from_state`` makes
    the same one."""

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float = 32.0
    targets: str | list[str] | None = None

    def target_modules(self, paths: Sequence[str]) -> str | list[str]:
        """Return PEFT's target_modules, for a model with adaptable modules at ``paths``."""
        if self.targets is not None:
            return self.targets
        if self.train_mlp and self.train_attn:
            return "all-linear"
        if not (self.train_mlp or self.train_attn):
            raise ValueError("train_mlp and train_attn are both False: nothing would be trained")
        wanted = "mlp" if self.train_mlp else "attn"
        split = [path.rpartition(".") for path in paths]
        found = sorted({leaf for owner, _, leaf in split if wanted in owner})
        if not found:
            raise ValueError(f"the model has no linear layers named like {wanted!r}: set targets")
        return found


def token_ids(values: Array, name: str) -> list[int]:
    """Return token ids as a list; ValueError, with ``name``, for anything else."""
    array = _flat(values, name)
    whole = array.astype(np.int64)
    if array.dtype.kind == "b" or bool((whole != array).any()):
        raise ValueError(f"{name} must be token ids, whole numbers; got {array.dtype}")
    if whole.size and whole.min() < 0:
        raise ValueError(f"{name} must be token ids, not negative; got {int(whole.min())}")
    return whole.tolist()


def numbers(values: Array, name: str) -> list[float]:
    """Return finite numbers as a list; ValueError, with ``name``, for anything else."""
    return _flat(values, name).astype(np.float64).tolist()


def _flat(values: Array, name: str) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    elif hasattr(values, "to_numpy"):  # Tinker's TensorData
        values = values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be one flat list of numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {array.shape}")
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{name} must be numbers; got {array.dtype}")
    if (wrong := np.flatnonzero(~np.isfinite(array))).size:
        raise ValueError(f"{name}[{wrong[0]}] is {array[wrong[0]]}: every value must be finite")
    return array
