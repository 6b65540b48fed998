"""The client API: Tinker's names and shapes over this machine, or over Tinker.

service, training, sampling, types   what scripts use: the three clients and their values
parameters    Tinker-only parameters, and what the local backend does with them
local_base    one base model: its learner, its sampler, its training thread; states on disk
rows          datums as the learner's training rows
futures       awaitable results, workers and ``*_async`` variants
tinker        the same three clients over the official SDK
"""

from agentrl_trainer.client.futures import APIFuture
from agentrl_trainer.client.sampling import SamplingClient
from agentrl_trainer.client.service import ServiceClient
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    RefusedRows,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "ModelInput",
    "OptimStepResponse",
    "RefusedRows",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TrainingClient",
]
