"""Sampler engines over small models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from small_models import as_base, qwen3, running_engine
from transformers import PreTrainedModel

from agentrl_trainer.inference import SamplerEngine
from agentrl_trainer.models.loading import BaseModel


@pytest.fixture
def base() -> BaseModel:
    return as_base(qwen3())


@pytest.fixture
def engine_of() -> Iterator[Callable[..., SamplerEngine]]:
    """Starts engines that stop with the test."""
    with ExitStack() as stack:

        def start(base: BaseModel, **options: Any) -> SamplerEngine:
            return stack.enter_context(running_engine(base, **options))

        yield start


@pytest.fixture
def reference(base: BaseModel) -> PreTrainedModel:
    """The model itself, which no engine changes."""
    return copy.deepcopy(base.model)


@pytest.fixture
def engine(
    engine_of: Callable[..., SamplerEngine], base: BaseModel, reference: PreTrainedModel
) -> SamplerEngine:
    return engine_of(base)
