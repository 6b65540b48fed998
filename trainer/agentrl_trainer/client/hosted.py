"""The tinker backend: the official SDK, on Tinker itself or a server that speaks its protocol.

Knows the SDK's client and types, and turns ours into its and back. The SDK is an optional extra
and is imported when a service is made. What becomes of the trainer's own rows is
``hosted_rows``'s; ``mask`` and other inputs of ours in a client's datum are for the local backend:
the SDK names what it does not know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from agentrl_trainer.checkpoint import (
    Restored,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
)
from agentrl_trainer.client.backend import Data, EndStatus
from agentrl_trainer.client.futures import Worker, finished, flattened, gather, map_future
from agentrl_trainer.client.hosted_rows import (
    HostedPolicy,
    bare,
    check_rows,
    folded,
    loss_of,
    native_config,
    stats_of,
    trained_logprobs,
)
from agentrl_trainer.client.naming import POINTER, new_folder
from agentrl_trainer.client.rows import check_loss, metrics_of
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
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss, Sums
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare

_DISCARDED = "before-non-finite"  # the state that is gone on from when gradients are discarded
_STATES = "tinker_states"  # in a checkpoint's meta: by client, the path of what save_state wrote


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
        self._rest = self._sdk.RestClient(base_url=base_url, api_key=api_key)
        self._trained: dict[str, HostedTraining] = {}
        self._worker = Worker("agentrl-tinker")  # for what is done here with the service's answers

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
        return self._training(made.result(), name)

    def train_from(
        self, path: str, *, optimizer: bool, options: StateOptions, name: str | None
    ) -> HostedTraining:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._service.create_training_client_from_state_with_optimizer
        made = make(path, **_given(**asdict(options)))
        return self._training(made.result(), name)

    def _training(self, client: Any, name: str | None) -> HostedTraining:
        again = self._service.create_training_client_from_state_with_optimizer
        made = HostedTraining(
            self._sdk, client, self._folder, name, self._worker, self._base, again
        )
        self._trained[made.name] = made
        return made

    def _base(self, base_model: str) -> HostedSampling:
        return self.sampler(None, base_model, SamplerOptions())

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
        found = self._rest.get_server_capabilities().result()
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
        name = f"step-{step:08d}"
        asked = {
            client: training.save_state(name, overwrite=True, options=SaveOptions())
            for client, training in self._trained.items()
        }

        def work() -> SavedPath:
            states = {client: saved.result().path for client, saved in asked.items()}
            kept = {**meta, _STATES: states}
            return SavedPath(str(save_checkpoint(root, step, tensors={}, meta=kept, keep=keep)))

        return self._worker.submit(work)

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        def work() -> Restored:
            found = latest_checkpoint(root)
            if found.folder is None:
                return Restored(None, {}, found.torn)
            checkpoint = load_checkpoint(found.folder)
            states = checkpoint.meta.get(_STATES, {})
            if states.keys() != self._trained.keys():
                raise ValueError(
                    f"checkpoint {found.folder} holds states of {sorted(states) or 'no client'} on "
                    f"Tinker, but this trains {sorted(self._trained)}"
                )
            # Loading into a client that exists is going to leave the SDK: each gets a new one.
            make = self._service.create_training_client_from_state_with_optimizer
            asked = {client: make(path) for client, path in states.items()}
            for client, made in asked.items():
                self._trained[client].go_on_as(made.result(), states[client])
            restore_rng(checkpoint.rng)
            return Restored(checkpoint.step, checkpoint.meta, found.torn)

        return self._worker.submit(work)

    def close(self, status: EndStatus, detail: str | None) -> None:
        self._worker.shutdown()
        self._service.close(status, detail).result()


class HostedTraining:
    """``base``: samples from a base model by its name. ``again``: the SDK's client of a state.

    What is asked for goes to the SDK at once, in order, unless something that was asked for before
    has yet to be decided here (``prepare``, a step of rows): then after it.
    """

    def __init__(
        self,
        sdk: Any,
        client: Any,
        folder: Path,
        name: str | None,
        worker: Worker,
        base: Callable[[str], HostedSampling],
        again: Callable[[str], Any],
    ) -> None:
        self._sdk = sdk
        self._worker = worker
        self._base = base
        self._again = again
        self._added: list[Future[ForwardBackwardOutput]] = []  # of rows, since the last step
        self._reference: HostedSampling | None = None
        self.go_on_as(client, None)
        self.name = name or self.info.model_id.replace(":", "-")
        self.folder = folder / self.name

    def go_on_as(self, client: Any, state: str | None) -> None:
        """``client``: the SDK's, of the same base model. ``state``: what it was made from."""
        self._client = client
        self._state = state  # the newest one saved or loaded
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

    def forward(
        self, data: Data, loss_fn: str, config: LossConfig | None
    ) -> Future[ForwardBackwardOutput]:
        if isinstance(data[0] if data else None, TrainingRow):
            return self._forward_of_rows(cast(Sequence[TrainingRow], data), loss_fn, config or {})
        sent = _datums(self._sdk, data)
        return self._worker.in_turn(lambda: self._forward(sent, loss_fn, config))

    def _forward_of_rows(
        self, given: Sequence[TrainingRow], loss_fn: str, config: LossConfig
    ) -> Future[ForwardBackwardOutput]:
        """The service is asked for log-probs; the loss is computed of them here."""
        started = time.perf_counter()
        rows = _trained(given, loss_fn, config)
        sent = _datums(self._sdk, [bare(row) for row in rows])

        def report(done: ForwardBackwardOutput) -> ForwardBackwardOutput:
            computed = [row["logprobs"] for row in done.loss_fn_outputs]
            value, sums = loss_of(
                rows, [torch.from_numpy(row) for row in computed], loss_fn, config
            )
            seen = stats_of(rows, value, sums, 1.0, started)
            stats = replace(seen, skipped_non_finite=False)  # there is no gradient to refuse
            outputs = trained_logprobs(given, computed)
            return ForwardBackwardOutput(outputs, metrics_of(stats, loss_fn), stats)

        asked = self._worker.in_turn(lambda: self._forward(sent, "cross_entropy", None))
        return map_future(asked, report)

    def _forward(
        self, sent: list[Any], loss_fn: str, config: LossConfig | None
    ) -> Future[ForwardBackwardOutput]:
        return map_future(self._client.forward(sent, loss_fn, config).future(), _output)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None,
        logprobs: bool,
    ) -> Future[ForwardBackwardOutput]:
        if isinstance(data[0] if data else None, TrainingRow):
            rows = cast(Sequence[TrainingRow], data)
            return self._of_rows(rows, loss_fn, config or {}, normalize_by, logprobs)
        if normalize_by != 1.0:
            raise ValueError(
                "normalize_by: Tinker sums over tokens; divide weights or advantages instead"
            )
        sent = _datums(self._sdk, data)
        return self._worker.in_turn(
            lambda: map_future(
                self._client.forward_backward(sent, loss_fn, config).future(), _output
            )
        )

    def _of_rows(
        self,
        given: Sequence[TrainingRow],
        loss_fn: str,
        config: LossConfig,
        normalize_by: float | None,
        logprobs: bool,
    ) -> Future[ForwardBackwardOutput]:
        started = time.perf_counter()
        rows = _trained(given, loss_fn, config)
        divisor = normalize_by or sum(row.trained for row in rows)
        seen: list[tuple[Tensor, Sums]] = []

        def loss(_: Any, computed: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            value, sums = loss_of(rows, computed, loss_fn, config)
            seen.append((value.detach(), sums))
            if not value.isfinite():
                # No gradient: it would poison those on the server. Were it raised here, the SDK
                # would refuse whatever is asked of this client from now on.
                value = torch.stack([row.nan_to_num().sum() for row in computed]).sum() * 0
            return value / divisor, {}

        def report(done: ForwardBackwardOutput) -> ForwardBackwardOutput:
            if not seen:
                loss(None, [torch.from_numpy(row["logprobs"]) for row in done.loss_fn_outputs])
            stats = stats_of(rows, *seen[0], divisor, started)
            computed = [row["logprobs"] for row in done.loss_fn_outputs]
            outputs = trained_logprobs(given, computed) if logprobs else []
            return ForwardBackwardOutput(outputs, done.metrics | metrics_of(stats, loss_fn), stats)

        own = native_config(loss_fn, config, rows)
        if own is None:
            added = self.forward_backward_custom([bare(row) for row in rows], loss)
        else:
            sent = [folded(row, divisor) for row in rows]
            added = self.forward_backward(sent, loss_fn, own, 1.0, True)
        done = map_future(added, report)
        self._added.append(done)
        return done

    def forward_backward_custom(
        self, data: Data, function: CustomLoss[Datum]
    ) -> Future[ForwardBackwardOutput]:
        ours: Any = data
        sent = _datums(self._sdk, data)

        def ask() -> Future[ForwardBackwardOutput]:
            done = self._client.forward_backward_custom(
                sent, lambda _, logprobs: function(ours, logprobs)
            )
            return map_future(done.future(), _output)

        return self._worker.in_turn(ask)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> Future[list[TrainingRow]]:
        policy = HostedPolicy(self._row_logprobs, self._reference_logprobs)
        return self._worker.submit(lambda: prepare(policy, rows, settings))

    def _row_logprobs(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        # On the worker, where its turn has come.
        sent = _datums(self._sdk, [bare(row) for row in rows])
        done = self._forward(sent, "cross_entropy", None).result()
        return [row["logprobs"].tolist() for row in done.loss_fn_outputs]

    def _reference_logprobs(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        if self._reference is None:
            self._reference = self._base(self.info.model_name)
        found = self._reference.logprobs([row.tokens for row in rows]).result()
        return [[lp or 0.0 for lp in row[1:]] for row in found]

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]:
        # What is not ours is the SDK's, of an optimizer that we do not know.
        ours = isinstance(adam, AdamParams)
        sent = self._sdk.AdamParams(**asdict(adam)) if ours else adam
        added, self._added = self._added, []

        def ask() -> Future[OptimStepResponse]:
            # A service need not look at what it applies, nor tell.
            if any(_not_finite(one) for one in added):
                self._discard_gradients()
                return finished(OptimStepResponse({"skipped_non_finite": 1.0}))
            done = self._client.optim_step(sent)
            return map_future(
                done.future(), lambda step: OptimStepResponse(dict(step.metrics or {}))
            )

        return flattened(self._worker.submit(ask)) if added else self._worker.in_turn(ask)

    def _discard_gradients(self) -> None:
        """Tinker's API has no way to forget them, but a client made from a state has none."""
        saved = self._client.save_state(_DISCARDED, overwrite=True).result()
        self.go_on_as(self._again(saved.path).result(), saved.path)

    def save_state(self, name: str, overwrite: bool, options: SaveOptions) -> Future[SavedPath]:
        def noted(saved: Any) -> SavedPath:
            self._state = saved.path
            return SavedPath(saved.path)

        def ask() -> Future[SavedPath]:
            done = self._client.save_state(name, overwrite=overwrite, **_given(**asdict(options)))
            return map_future(done.future(), noted)

        return self._worker.in_turn(ask)

    def load_state(self, path: str, optimizer: bool, access_token: str | None) -> Future[None]:
        def noted(_: Any) -> None:
            self._state = path

        def ask() -> Future[None]:
            load = self._client.load_state_with_optimizer if optimizer else self._client.load_state
            done = load(path, **_given(weights_access_token=access_token))
            return map_future(done.future(), noted)

        return self._worker.in_turn(ask)

    def save_weights_for_sampler(self, name: str | Path, options: SaveOptions) -> Future[SavedPath]:
        asked = name.name if isinstance(name, Path) else name

        def pointed(saved: Any) -> SavedPath:
            if isinstance(name, Path):
                name.mkdir(parents=True, exist_ok=True)
                pointer = {"path": saved.path, "state": self._state}
                (name / POINTER).write_text(json.dumps(pointer), encoding="utf-8")
            return SavedPath(saved.path)

        def ask() -> Future[SavedPath]:
            done = self._client.save_weights_for_sampler(asked, **_given(**asdict(options)))
            return map_future(done.future(), pointed)

        return self._worker.in_turn(ask)

    def sampler(self, options: SamplerOptions) -> HostedSampling:
        self._worker.idle()
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


def _trained(given: Sequence[TrainingRow], loss_fn: str, config: LossConfig) -> list[TrainingRow]:
    """Those that train something. Raises ValueError for what cannot be learned from, or by."""
    check_loss(loss_fn, config)
    check_rows(given)
    rows = [row for row in given if row.trained]
    if not rows:
        raise ValueError("data: none of the rows has a token to learn from")
    return rows


def _datums(sdk: Any, data: Data) -> list[Any]:
    sent: list[Any] = []
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise ValueError(f"data[{index}] is no Datum: rows and datums do not mix")
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


def _not_finite(added: Future[ForwardBackwardOutput]) -> bool:
    """Waits for it. What failed has a reason of its own, and told its caller."""
    if added.exception() is not None:
        return False
    stats = added.result().stats
    return stats is not None and stats.skipped_non_finite


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
