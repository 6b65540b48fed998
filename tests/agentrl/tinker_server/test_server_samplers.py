"""The Tinker server keeps the sampling clients that were used most recently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_data import ROW, TINY
from fastapi import HTTPException

from agentrl.tinker_server.samplers import Samplers
from agentrl_trainer.client import ServiceClient


def test_which_samplers_are_kept(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        path = training.save_weights_for_sampler("a").result().path
        loads: list[str] = []

        def load(uri: str) -> Any:
            loads.append(uri)
            return service.create_sampling_client(model_path=uri)

        samplers = Samplers(load, kept=2)
        samplers.add("s:base", service.create_sampling_client(base_model=TINY), None, is_base=True)
        for name in "abc":
            samplers.add(f"s:{name}", load(path), path)
        samplers.add("s:1", training.save_weights_and_get_sampling_client(), None)
        samplers.add("s:2", training.save_weights_and_get_sampling_client(), None)
        samplers.get("s:1")
        samplers.add("s:3", training.save_weights_and_get_sampling_client(), None)
        assert samplers.loaded == ["s:b", "s:c", "s:1", "s:3"]
        samplers.get("s:base")
        with pytest.raises(HTTPException, match="saved nowhere"):
            samplers.get("s:2")
        assert len(samplers.get("s:a").compute_logprobs(ROW).result()) == len(ROW)  # made again
        assert len(loads) == 4
        assert samplers.loaded == ["s:c", "s:1", "s:3", "s:a"]
