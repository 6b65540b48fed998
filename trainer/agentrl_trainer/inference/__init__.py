"""The embedded sampler: continuous batching over any causal language model with full attention."""

from agentrl_trainer.inference.engine import Handle, SamplerEngine, check_params
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
