"""The embedded sampler: continuous batching over any causal language model."""

from agentrl_trainer.inference.engine import SamplerEngine
from agentrl_trainer.inference.requests import (
    Event,
    Finished,
    RequestError,
    SampleParams,
    SampleRequest,
    Token,
    check_params,
)

__all__ = [
    "Event",
    "Finished",
    "RequestError",
    "SampleParams",
    "SampleRequest",
    "SamplerEngine",
    "Token",
    "check_params",
]
