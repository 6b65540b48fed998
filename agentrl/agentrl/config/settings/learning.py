"""The adapter and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config.field_types import (
    Count,
    NonNegative,
    Positive,
    Table,
    Whole,
    from_json,
    read_place,
)

Options = Annotated[dict[str, Any], BeforeValidator(from_json)]


class LearningSettings(Table):
    """The adapter and its optimizer."""

    init_adapter: Path | None = None
    """Start from RUN, RUN@STEP, RUN@best or a PEFT folder. PEFT, TRL or Unsloth may have made it;
    rank and alpha are its own. By default adapters are fresh."""
    init_optimizer: bool = False
    """Take its optimizer too. Its run must have a checkpoint of that step."""
    learning_rate: Positive | None = None
    """Adam's; by default chosen by the model's size and alpha."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the steps of the run."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises to its full value."""
    max_grad_norm: NonNegative = 0.0
    """Clip gradients to this norm; 0 is off."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """LoRA rank."""
    alpha: Positive = 32
    """LoRA alpha: updates are scaled by alpha / rank."""
    epochs: Count = 1
    """Optimizer passes over a step's rollouts; above 1 use a clipping loss."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest trajectory in tokens; by default the model's context."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """Tokens whose activations are held: those of a forward pass, and as many of longer shared
    prefixes as remain; lower saves memory. By default 4096; on CUDA 16384, or what fits."""
    trainers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that compute an update together, on CUDA each on a GPU. With ray:4, one runs here
    and three on Ray; with `run.backend = "verl"` all are workers on Ray."""
    trainers_on: Literal["here", "ray"] = "here"
    """Run the others on this machine, or as actors of a Ray cluster."""
    shard_base: bool = False
    """Spread the base model over the trainers. For models that one GPU cannot hold."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""

    @model_validator(mode="before")
    @classmethod
    def _read_place(cls, given: Any) -> Any:
        """Read ``trainers = "ray:4"`` as 4 trainers on Ray."""
        return read_place(given, "trainers")


class VerlSettings(Table):
    """verl's workers, of ``run.backend = "verl"``; ``learning.trainers`` says how many."""

    nodes: Count = 1
    """Equal parts in which the workers are placed; those of a part are on one node."""
    engine: Options = Field(default_factory=dict[str, Any])
    """Options of verl's FSDPEngineConfig, such as {param_offload = true}."""
    model: Options = Field(default_factory=dict[str, Any])
    """Options of verl's HFModelConfig, such as {use_remove_padding = true}."""
