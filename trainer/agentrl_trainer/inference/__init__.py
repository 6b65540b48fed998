"""The embedded sampler: continuous batching over any causal language model."""

from agentrl_trainer.inference.engine import Handle, SamplerEngine
from agentrl_trainer.inference.requests import (
    Event,
    Finished,
    FinishReason,
    RequestError,
    RequestErrorCode,
    SampleParams,
    SampleRequest,
    SamplerStats,
    Token,
    check_params,
)

__all__ = [
    "Event",
    "FinishReason",
    "Finished",
    "Handle",
    "RequestError",
    "RequestErrorCode",
    "SampleParams",
    "SampleRequest",
    "SamplerEngine",
    "SamplerStats",
    "Token",
    "check_params",
]
