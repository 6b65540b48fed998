"""The tinker backend: the official SDK, on Tinker itself or a server that speaks its protocol.

Knows the SDK's client and types, and turns ours into its and back. The SDK is an optional extra
and is imported when a service is made. Learning from ``mask`` and other inputs of ours is for the
local backend: the SDK names what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agentrl_trainer.checkpoint import Restored
from agentrl_trainer.client.backend import CustomLoss, Data, EndStatus
from agentrl_trainer.client.futures import finished, gather, map_future
from agentrl_trainer.client.naming import new_folder
from agentrl_trainer.client.types import (
    AdamParams,
    Datum,
    Folder,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    LoraOptions,
    ModelData,
    ModelInfo,
    OptimStepResponse,
    SampledSequence,
    SampleOptions,
    SampleResponse,
    SamplerOptions,
    SavedPath,
    SaveOptions,
    StateOptions,
    SupportedModel,
    numbers,
    whole_numbers,
)
from agentrl_trainer.losses import LossConfig


class HostedService:
    """``base_url`` None: Tinker's own; ``api_key`` None: ``TINKER_API_KEY``. ``options`` are what
    else the SDK's ServiceClient takes."""

    def __init__(
        self, base_url: str | None, api_key: str | None, folder: Folder | None, **options: Any
    ) -> None:
        try:
            self._sdk = import_module("tinker")
        except ImportError as error:
            raise ImportError(
                "backend='tinker' needs the official SDK: pip install 'agentrl[tinker]'"
            ) from error
        self._folder = Path(folder) if folder is not None else new_folder("tinker")
        self._service = self._sdk.ServiceClient(base_url=base_url, api_key=api_key, **options)

    def train(self, base_model: str, options: LoraOptions, name: str | None) -> HostedTraining:
        if options.targets is not None or options.alpha != LoraOptions().alpha:
            raise ValueError("targets and alpha are for the local backend")
        made = self._service.create_lora_training_client(
            base_model,
            rank=options.rank,
            seed=options.seed,
            train_mlp=options.train_mlp,
            train_attn=options.train_attn,
            **_given(
                train_unembed=options.train_unembed,
                user_metadata=options.user_metadata,
                optimizer=options.optimizer,
            ),
        )
        return HostedTraining(self._sdk, made.result(), self._folder, name)

    def train_from(
        self, path: str, *, optimizer: bool, options: StateOptions, name: str | None
    ) -> HostedTraining:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._service.create_training_client_from_state_with_optimizer
        made = make(path, **_given(**asdict(options)))
        return HostedTraining(self._sdk, made.result(), self._folder, name)

    def sampler(
        self, model_path: str | None, base_model: str | None, options: SamplerOptions
    ) -> HostedSampling:
        made = self._service.create_sampling_client(
            model_path=model_path,
            base_model=base_model,
            retry_config=options.retry_config,
            record_stability_info=options.record_stability_info,
        )
        return HostedSampling(self._sdk, made)

    def capabilities(self) -> GetServerCapabilitiesResponse:
        found = self._service.create_rest_client().get_server_capabilities().result()
        return GetServerCapabilitiesResponse(
            [
                SupportedModel(
                    one.model_name or "", one.max_context_length, one.trainable, one.sampleable
                )
                for one in found.supported_models
            ]
        )

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]:
        _local_only("save_checkpoint", "save_state")

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        _local_only("restore_checkpoint", "load_state")

    def close(self, status: EndStatus, detail: str | None) -> None:
        self._service.close(status, detail).result()


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
        # What is not ours is the SDK's, of an optimizer that we do not know.
        ours = isinstance(adam, AdamParams)
        done = self._client.optim_step(self._sdk.AdamParams(**asdict(adam)) if ours else adam)
        return map_future(done.future(), lambda step: OptimStepResponse(dict(step.metrics or {})))

    def save_state(self, name: str, overwrite: bool, options: SaveOptions) -> Future[SavedPath]:
        done = self._client.save_state(name, overwrite=overwrite, **_given(**asdict(options)))
        return map_future(done.future(), lambda saved: SavedPath(saved.path))

    def load_state(self, path: str, optimizer: bool, access_token: str | None) -> Future[None]:
        load = self._client.load_state_with_optimizer if optimizer else self._client.load_state
        done = load(path, **_given(weights_access_token=access_token))
        return map_future(done.future(), lambda _: None)

    def save_weights_for_sampler(self, name: str | Path, options: SaveOptions) -> Future[SavedPath]:
        if isinstance(name, Path):
            raise ValueError("save_weights_for_sampler: Tinker takes a name, no path")
        done = self._client.save_weights_for_sampler(name, **_given(**asdict(options)))
        return map_future(done.future(), lambda saved: SavedPath(saved.path))

    def sampler(self, options: SamplerOptions) -> HostedSampling:
        made = self._client.save_weights_and_get_sampling_client(
            retry_config=options.retry_config,
            record_stability_info=options.record_stability_info,
            kind=options.kind,
        )
        return HostedSampling(self._sdk, made)

    def close(self) -> Future[None]:
        return finished(None)  # Tinker keeps what a session has until the session ends

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
        return finished(None)

    def sample(self, prompt: list[int], options: SampleOptions) -> Future[SampleResponse]:
        done = self._client.sample(
            prompt=self._sdk.ModelInput.from_ints(prompt),
            num_samples=options.num_samples,
            sampling_params=self._sdk.SamplingParams(**asdict(options.params)),
            include_prompt_logprobs=options.include_prompt_logprobs,
            prompt_logprobs_last_n=options.prompt_logprobs_last_n,
            topk_sample_logprobs=options.topk_sample_logprobs,
            topk_prompt_logprobs=options.topk_prompt_logprobs,
            target_prompt_logprobs=options.target_prompt_logprobs,
            prompt_alt_tokens_k=options.prompt_alt_tokens_k,
        )
        return map_future(_concurrent(done), _samples)

    def logprobs(
        self, rows: Sequence[list[int]], last_n: int | None = None
    ) -> Future[list[list[float | None]]]:
        inputs = [self._sdk.ModelInput.from_ints(row) for row in rows]
        asked = [self._client.compute_logprobs(one, last_n) for one in inputs]
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
        done.topk_prompt_logprobs,
        done.target_prompt_logprobs,
        done.prompt_alt_tokens,
    )


def _given(**options: Any) -> dict[str, Any]:
    """Those that are set: the others' defaults are the SDK's."""
    return {name: value for name, value in options.items() if value is not None}


def _concurrent(made: Any) -> Future[Any]:
    # The SDK's own future first: for now it is a Future too, which warns when used as one.
    return made.future() if hasattr(made, "future") else made


def _local_only(what: str, instead: str) -> NoReturn:
    raise ValueError(f"{what} is for the local backend; use {instead}")
