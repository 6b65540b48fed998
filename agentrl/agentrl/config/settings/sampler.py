"""What samples the model: the embedded engine, vLLM or Tinker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.config.field_types import Count, HttpUrl, NonNegative, Table, Variable, from_names
from agentrl.config.secrets import check_url
from agentrl_trainer.names import SamplerWeights

_VllmUrl = Annotated[str, Field(pattern="^(https?://|unix:/).+"), AfterValidator(check_url)]


def _urls(value: Any) -> Any:
    return [] if value is None else from_names(value)


class VllmSamplerSettings(Table):
    """The vLLM server that samples with ``sampler.kind = "vllm"``."""

    python: Path | None = None
    """Interpreter that has vLLM, best in its own environment; by default this one."""
    args: str = ""
    """More arguments for the server that is started, for instance '--gpu-memory-utilization 0.4' to
    leave the trainer room on a shared GPU."""
    engines: Count = 1
    """Data-parallel engines of a server (--data-parallel-size). All calls of a rollout go to one of
    them."""
    sleep: bool = False
    """Let the server that is started give up its GPU memory while the trainer updates (vLLM's sleep
    mode). Never run."""
    url: Annotated[list[_VllmUrl], BeforeValidator(_urls)] = Field(default_factory=list[str])
    """URL of a running vLLM server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which
    sees the run folder under the same path; or URLs of several."""
    wait: NonNegative = 60
    """Seconds to wait at the start for the server at url."""
    key_env: Variable | None = None
    """NAME of the environment variable that holds that server's API key."""


class SamplerSettings(Table):
    """What samples the model, and its defaults."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """What samples: the embedded engine, or a vLLM server."""
    weights: SamplerWeights = "model"
    """Weights that the embedded sampler computes with: the model's, or on a CPU rounded ones, which
    are smaller and quicker to read. Then its policy differs a little from the trainer's, and by
    default algorithm.correction.mode is truncate."""
    kv_tokens: Count | None = None
    """Most tokens whose keys and values the embedded sampler keeps, those of ended answers among
    them, which later prompts may continue; lower saves memory. By default what fits into a quarter
    of the free memory and 4 GiB, or into 0.6 of a GPU's."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature where the request sets none."""
    max_tokens: Count = 256
    """Longest answer in tokens where the request sets no limit."""
    thinking: bool | None = None
    """Whether the model thinks before it answers where the request does not say, for models whose
    chat template has a switch (`enable_thinking`); by default the template decides."""
    vllm: VllmSamplerSettings = VllmSamplerSettings()


class TrainSamplerSettings(SamplerSettings):
    samplers: Annotated[int, Field(ge=1, le=64)] = 1
    """Samplers, each with a copy of the model; on CUDA each on a GPU. Each has at least one
    gateway of its own."""


class TinkerSettings(Table):
    """Tinker, or a server that speaks its protocol, of ``run.backend = "tinker"``."""

    base_url: HttpUrl | None = None
    """URL of a server that speaks Tinker's protocol, such as `agentrl tinker-server`; by default
    TINKER_BASE_URL, else Tinker itself."""
    tokenizer: str | None = None
    """Folder or Hugging Face name of the model's configuration, tokenizer and chat template, where
    it differs from model.name."""
