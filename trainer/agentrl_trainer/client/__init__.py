"""The client API: Tinker's names and shapes over this machine, or over Tinker.

service, training, sampling, types   what scripts use: the three clients and their values
parameters   Tinker-only parameters, and what the local backend does with them
local, tinker   the two backends: they have the same methods
rows         the clients' datums as the learner's training rows
futures, async_api, naming   awaitable results, ``*_async`` variants, names on disk
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
