"""The tinker backend: the official SDK, on Tinker itself or a server that speaks its protocol.

Knows the SDK's client and types, and turns ours into its and back. The SDK is an optional extra
and is imported when a service is made. Learning from ``mask`` and other inputs of ours is for the
local backend: the SDK names what it does not know.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agentrl_trainer.checkpoint import Restored
from agentrl_trainer.client.backend import CustomLoss, Data
from agentrl_trainer.client.futures import gather, map_future
from agentrl_trainer.client.types import (
    AdamParams,
    Datum,
    Folder,
    ForwardBackwardOutput,
    LoraOptions,
    ModelData,
    ModelInfo,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SavedPath,
    numbers,
    whole_numbers,
)
from agentrl_trainer.losses import LossConfig


class HostedService:
    """``base_url`` None: Tinker's own; ``api_key`` None: ``TINKER_API_KEY``."""

    def __init__(self, base_url: str | None, api_key: str | None, folder: Folder | None) -> None:
        try:
            self._sdk = import_module("tinker")
        except ImportError as error:
            raise ImportError(
                "backend='tinker' needs the official SDK: pip install 'agentrl[tinker]'"
            ) from error
        stamp = f"tinker-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._folder = Path(folder) if folder is not None else Path("runs") / stamp
        self._service = self._sdk.ServiceClient(base_url=base_url, api_key=api_key)

    def train(self, base_model: str, options: LoraOptions, name: str | None) -> HostedTraining:
        if options.targets is not None or options.alpha != LoraOptions().alpha:
            raise ValueError("targets and alpha are for the local backend")
        made = self._service.create_lora_training_client(
            base_model,
            rank=options.rank,
            seed=options.seed,
            train_mlp=options.train_mlp,
            train_attn=options.train_attn,
            train_unembed=options.train_unembed,
            user_metadata=dict(options.user_metadata or {}) or None,
        )
        return HostedTraining(self._sdk, made.result(), self._folder, name)

    def train_from(self, path: str, *, optimizer: bool, name: str | None) -> HostedTraining:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._service.create_training_client_from_state_with_optimizer
        return HostedTraining(self._sdk, make(path).result(), self._folder, name)

    def sampler(self, model_path: str | None, base_model: str | None) -> HostedSampling:
        made = self._service.create_sampling_client(model_path=model_path, base_model=base_model)
        return HostedSampling(self._sdk, made)

    def models(self) -> list[str]:
        found = self._service.create_rest_client().get_server_capabilities().result()
        return [model.model_name for model in found.supported_models]

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]:
        _local_only("save_checkpoint", "save_state")

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        _local_only("restore_checkpoint", "load_state")

    def close(self, error: BaseException | None) -> None:
        if error is None:
            done = self._service.close("success")
        elif isinstance(error, KeyboardInterrupt):
            done = self._service.close("interrupted")
        else:
            done = self._service.close("errored", f"{type(error).__name__}: {error}")
        done.result()


class HostedTraining:
    def __init__(self, sdk: Any, client: Any, folder: Path, name: str | None) -> None:
        self._sdk = sdk
        self._client = client
        found = client.get_info()
        model = found.model_data
        self.info = ModelInfo(
            model_id=found.model_id,
            model_data=ModelData(
                model.arch or "", model.model_name or "", model.tokenizer_id or ""
            ),
            model_name=found.model_name or model.model_name or "",
            lora_rank=found.lora_rank,
        )
        self.folder = folder / (name or found.model_id.replace(":", "-"))

    def forward(
        self, data: Data, loss_fn: str, config: LossConfig | None
    ) -> Future[ForwardBackwardOutput]:
        sent = _datums(self._sdk, data)
        return map_future(self._client.forward(sent, loss_fn, config).future(), _output)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None,
        logprobs: bool,
    ) -> Future[ForwardBackwardOutput]:
        if normalize_by != 1.0:
            raise ValueError(
                "normalize_by: Tinker sums over tokens; divide weights or advantages instead"
            )
        sent = _datums(self._sdk, data)
        return map_future(self._client.forward_backward(sent, loss_fn, config).future(), _output)

    def forward_backward_custom(
        self, data: Data, function: CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        ours: Any = data
        done = self._client.forward_backward_custom(
            _datums(self._sdk, data), lambda _, logprobs: function(ours, logprobs)
        )
        return map_future(done.future(), _output)

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]:
        done = self._client.optim_step(self._sdk.AdamParams(**asdict(adam)))
        return map_future(done.future(), lambda step: OptimStepResponse(dict(step.metrics or {})))

    def save_state(self, name: str, overwrite: bool) -> Future[SavedPath]:
        done = self._client.save_state(name, overwrite=overwrite)
        return map_future(done.future(), lambda saved: SavedPath(saved.path))

    def load_state(self, path: str, optimizer: bool) -> Future[None]:
        load = self._client.load_state_with_optimizer if optimizer else self._client.load_state
        return map_future(load(path).future(), lambda _: None)

    def save_weights_for_sampler(self, name: str | Path) -> Future[SavedPath]:
        if isinstance(name, Path):
            raise ValueError("save_weights_for_sampler: Tinker takes a name, no path")
        done = self._client.save_weights_for_sampler(name)
        return map_future(done.future(), lambda saved: SavedPath(saved.path))

    def sampler(self) -> HostedSampling:
        return HostedSampling(self._sdk, self._client.save_weights_and_get_sampling_client())

    def local(self, work: Callable[[Any], Any]) -> Future[Any]:
        _local_only("local", "what Tinker's own API has")

    def tokenizer(self) -> Any:
        return self._client.get_tokenizer()


class HostedSampling:
    """``made``: a sampling client of the SDK, or its future of one."""

    def __init__(self, sdk: Any, made: Any) -> None:
        self._sdk = sdk
        self._client = made.result() if hasattr(made, "result") else made
        self.base_model = str(self._client.get_base_model())

    @property
    def ready(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def sample(
        self,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool,
        topk: int,
    ) -> Future[SampleResponse]:
        done = self._client.sample(
            prompt=self._sdk.ModelInput.from_ints(prompt),
            num_samples=num_samples,
            sampling_params=self._sdk.SamplingParams(**asdict(params)),
            include_prompt_logprobs=prompt_logprobs,
            topk_sample_logprobs=topk,
        )
        return map_future(_concurrent(done), _samples)

    def logprobs(self, rows: Sequence[list[int]]) -> Future[list[list[float | None]]]:
        asked = [self._client.compute_logprobs(self._sdk.ModelInput.from_ints(row)) for row in rows]
        return gather([_concurrent(one) for one in asked])

    def tokenizer(self) -> Any:
        return self._client.get_tokenizer()


def _datums(sdk: Any, data: Data) -> list[Any]:
    sent: list[Any] = []
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise ValueError(f"data[{index}]: the trainer's own rows are for the local backend")
        inputs: dict[str, Any] = {}
        for name, values in datum.loss_fn_inputs.items():
            where = f"data[{index}]: {name}"
            if name == "target_tokens":
                inputs[name] = np.asarray(whole_numbers(values, where), dtype=np.int64)
            else:
                inputs[name] = np.asarray(numbers(values, where), dtype=np.float32)
            if len(inputs[name]) != datum.model_input.length:
                raise ValueError(
                    f"{where} has {len(inputs[name])} values, model_input "
                    f"{datum.model_input.length} tokens: one for each"
                )
        read = sdk.ModelInput.from_ints(datum.model_input.to_ints())
        sent.append(sdk.Datum(model_input=read, loss_fn_inputs=inputs))
    return sent


def _output(done: Any) -> ForwardBackwardOutput:
    rows = [
        {name: np.asarray(values.data, dtype=np.float32) for name, values in row.items()}
        for row in done.loss_fn_outputs
    ]
    return ForwardBackwardOutput(rows, dict(done.metrics))


def _samples(done: Any) -> SampleResponse:
    return SampleResponse(
        [
            SampledSequence(
                list(one.tokens), list(one.logprobs or []), one.stop_reason, one.topk_logprobs
            )
            for one in done.sequences
        ],
        done.prompt_logprobs,
    )


def _concurrent(made: Any) -> Future[Any]:
    # The SDK's own future first: for now it is a Future too, which warns when used as one.
    return made.future() if hasattr(made, "future") else made


def _local_only(what: str, instead: str) -> NoReturn:
    raise ValueError(f"{what} is for the local backend; use {instead}")
