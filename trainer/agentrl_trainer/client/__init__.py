"""The client API: Tinker's names and shapes over this machine, or over Tinker."""

from agentrl_trainer.client.backend import RefusedRows
from agentrl_trainer.client.clients import SamplingClient, ServiceClient, TrainingClient
from agentrl_trainer.client.futures import APIFuture
from agentrl_trainer.client.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
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
