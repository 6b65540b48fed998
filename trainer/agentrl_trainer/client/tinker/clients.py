"""Training and sampling clients on Tinker: they convert our values to the SDK's and back.

``tinker.rows`` converts the trainer's own rows. ``mask`` and other inputs of ours in a client's
datum are for the local backend: Tinker names what it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import tinker
import torch
from torch import Tensor

from agentrl_trainer.client.futures import APIFuture, finished, gather, map_future
from agentrl_trainer.client.rows import metrics_of
from agentrl_trainer.client.sampling import Prompt, SamplingClient, tokens_of
from agentrl_trainer.client.tinker.rows import (
    IMPOSSIBLE,
    aligned,
    check_rows,
    folded,
    loss_of,
    native_config,
    trained_logprobs,
    unweighted,
)
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import (
    AdamParams,
    D,
    Data,
    Datum,
    Folder,
    ForwardBackwardOutput,
    LossCall,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SavedPath,
    numbers,
    token_ids,
)
from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig, parse_loss_options
from agentrl_trainer.learner.losses import CustomLoss, Sums
from agentrl_trainer.learner.prepare_batch import UpdateSettings, finite_parts, prepare
from agentrl_trainer.learner.step_stats import step_stats
from agentrl_trainer.names import check_name

if TYPE_CHECKING:
    from agentrl_trainer.client.tinker.service import TinkerServiceClient

T = TypeVar("T")

_DISCARDED = "before-non-finite"  # the state to continue from after discarded gradients
_POINTER = "tinker.json"
"""In an adapter's folder: the weights' ``path`` on Tinker, and the path of the newest ``state``
before them, which Tinker offers for download."""


class TinkerTrainingClient(TrainingClient):
    """Sends operations in order on the service's worker; a step of training rows waits there for
    their losses. It is also the ``Policy`` of ``prepare_batch``, on that worker."""

    def __init__(self, service: TinkerServiceClient, client: Any, name: str | None) -> None:
        self._service, self._start = service, service.responses.start
        self._added: list[Future[ForwardBackwardOutput]] = []  # of training rows, since the step
        self._reference: TinkerSamplingClient | None = None
        self.continue_as(client, None)
        self.name = check_name(name or self.model_id.replace(":", "-"), "name")
        self.folder = service.folder / self.name
        self.history = []

    def continue_as(self, client: Any, state: str | None) -> None:
        """Replace the SDK's client by one of the same base model, made from ``state``."""
        self._client = client
        self._state = state  # the newest one saved or loaded
        self._info = client.get_info()  # has the same fields

    def _call(
        self, convert: Callable[[Any], T], method: str, *args: Any, **options: Any
    ) -> APIFuture[T]:
        """Call a method of the SDK's client in its turn, and convert its result."""
        return self._start(
            lambda: map_future(getattr(self._client, method)(*args, **options).future(), convert)
        )

    def _loss(self, call: LossCall) -> APIFuture[ForwardBackwardOutput]:
        if call.data and isinstance(call.data[0], TrainingRow):
            done = self._loss_of_rows(call)
            if call.backward:
                self._added.append(done)
            return done
        if call.normalize_by != 1.0:
            raise ValueError(
                "normalize_by: Tinker sums over tokens; divide weights or advantages instead"
            )
        method = "forward_backward" if call.backward else "forward"
        data = _datums(call.data)
        return self._call(_output, method, data, call.loss_fn, call.config)

    def forward_backward_custom(
        self, data: Sequence[D], loss_fn: CustomLoss[D], **more: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        def of_ours(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            return loss_fn(data, logprobs)

        sent = _datums(cast(Data, data))
        return self._call(_output, "forward_backward_custom", sent, of_ours, **more)

    def _loss_of_rows(self, call: LossCall) -> APIFuture[ForwardBackwardOutput]:
        """Learn from training rows: by Tinker's loss if it has it, else by our formula on the
        log-probs that it returns."""
        given, config = cast(Sequence[TrainingRow], call.data), call.config or {}
        parse_loss_options(call.loss_fn, config)
        check_rows(given)
        rows = [row for row in given if row.trained]
        if not rows:
            raise ValueError("data: none of the rows has a token to learn from")
        divisor = call.normalize_by or sum(row.trained for row in rows)
        seen: list[tuple[Tensor, Sums]] = []

        def loss(_: Any, computed: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            value, sums = loss_of(rows, computed, call.loss_fn, config)
            seen.append((value.detach(), sums))
            if not value.isfinite():
                # A gradient that is not finite would spoil those on the server; an error raised
                # here would make the SDK refuse all further operations of this client.
                value = torch.stack([row.nan_to_num().sum() for row in computed]).sum() * 0
            return value / divisor, {}

        def report(done: ForwardBackwardOutput) -> ForwardBackwardOutput:
            computed = [row["logprobs"] for row in done.loss_fn_outputs]
            if not seen:
                loss(None, [torch.from_numpy(row) for row in computed])
            total, sums = seen[0]
            # Each row counts by itself: what the service shares among rows is unknown.
            counts, refused = count_tokens(rows), call.backward and not bool(total.isfinite())
            stats = step_stats(total.item() / divisor, sums, counts, non_finite=refused)
            metrics = done.metrics if call.backward else {}
            outputs = trained_logprobs(given, computed) if call.logprobs else []
            return ForwardBackwardOutput(outputs, metrics | metrics_of(stats, call.loss_fn), stats)

        native = native_config(call.loss_fn, config, rows)
        if not call.backward:
            done = self.forward([unweighted(row) for row in rows])
        elif native is None:
            done = self.forward_backward_custom([unweighted(row) for row in rows], loss)
        else:
            sent = [folded(row, divisor) for row in rows]
            done = self.forward_backward(sent, call.loss_fn, native)
        return map_future(done, report)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> APIFuture[list[TrainingRow]]:
        return self._service.responses.submit(lambda: prepare(self, rows, settings))

    def finite_rows(
        self, rows: Sequence[TrainingRow], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[list[int]]:
        """Find the rows whose loss is finite; Tinker does not show gradients."""

        def finite(some: Sequence[int]) -> bool:
            if not (part := [rows[i] for i in some if rows[i].trained]):
                return True
            loss, _ = loss_of(part, self._logprobs(part), loss_fn, loss_fn_config or {})
            return bool(loss.isfinite())

        return self._service.responses.submit(lambda: finite_parts(range(len(rows)), finite))

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        check_rows(rows)
        return list(rows)

    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        raise ValueError(IMPOSSIBLE["returns"])

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        if adapter is not None:
            raise ValueError("kl_reference: over Tinker the reference is the base model")
        if self._reference is None:
            base = self._info.model_data.model_name
            self._reference = self._service.create_sampling_client(None, base)
        found = self._reference.compute_logprobs_batch([row.tokens for row in rows]).result()
        computed = [[lp or 0.0 for lp in row[1:]] for row in found]
        return with_extra(rows, reference=aligned(rows, computed))

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        computed = [found.numpy() for found in self._logprobs(rows)]
        return with_extra(rows, proximal=aligned(rows, computed))

    def _logprobs(self, rows: Sequence[TrainingRow]) -> list[Tensor]:
        """Compute log-probs, from the thread on which this client's own operations would wait."""
        sent = _datums([unweighted(row) for row in rows])
        done = _output(self._client.forward(sent, "cross_entropy", None).result())
        return [torch.from_numpy(row["logprobs"]) for row in done.loss_fn_outputs]

    def _step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]:
        # The SDK has other optimizers, whose parameters are sent as given.
        sent = tinker.AdamParams(**asdict(adam)) if isinstance(adam, AdamParams) else adam
        added, self._added = self._added, []

        def start() -> APIFuture[OptimStepResponse]:
            # A failed loss has told its caller why.
            losses = [one.result().stats for one in added if one.exception() is None]
            # A service may apply gradients that are not finite, so it must not be asked to.
            if any(stats.skipped_non_finite for stats in losses):
                # Tinker's API cannot clear gradients: continue as a client made from a state.
                saved = self._client.save_state(_DISCARDED, overwrite=True).result()
                self.continue_as(self._service.resume(saved.path), saved.path)
                return finished(OptimStepResponse({"skipped_non_finite": 1.0}))
            stepped = self._client.optim_step(sent).future()
            return map_future(stepped, lambda done: OptimStepResponse(dict(done.metrics or {})))

        return self._start(start)

    def save_state(
        self, name: str, *, overwrite: bool = False, **more: Any
    ) -> APIFuture[SavedPath]:
        def noted(saved: Any) -> SavedPath:
            self._state = saved.path
            return SavedPath(saved.path)

        return self._call(noted, "save_state", name, overwrite=overwrite, **more)

    def _load(self, path: Folder, optimizer: bool, more: Mapping[str, Any]) -> APIFuture[None]:
        def noted(_: Any) -> None:
            self._state = str(path)

        method = "load_state_with_optimizer" if optimizer else "load_state"
        return self._call(noted, method, str(path), **more)

    def save_weights_for_sampler(self, name: str | Path, **more: Any) -> APIFuture[SavedPath]:
        def pointed(saved: Any) -> SavedPath:
            if isinstance(name, Path):
                name.mkdir(parents=True, exist_ok=True)
                pointer = {"path": saved.path, "state": self._state}
                (name / _POINTER).write_text(json.dumps(pointer), encoding="utf-8")
            return SavedPath(saved.path)

        last = name.name if isinstance(name, Path) else name
        return self._call(pointed, "save_weights_for_sampler", last, **more)

    def save_weights_and_get_sampling_client(self, **more: Any) -> TinkerSamplingClient:
        save = partial(self._client.save_weights_and_get_sampling_client, **more)
        return TinkerSamplingClient(self._service.responses.submit(save).result())

    def local(self, work: Callable[[Learner], T]) -> APIFuture[T]:
        raise ValueError("local is for the local backend; use what Tinker's own API has")

    def get_tokenizer(self) -> Any:
        return self._client.get_tokenizer()

    def close(self) -> APIFuture[None]:
        return finished(None)  # Tinker keeps models until their session ends


class TinkerSamplingClient(SamplingClient):
    """``made`` is the SDK's future of its sampling client."""

    def __init__(self, made: Any) -> None:
        self._client = made.result()

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        *,
        topk_sample_logprobs: int = 0,
        **more: Any,
    ) -> APIFuture[SampleResponse]:
        """Return the SDK's response, which has the fields of ours and more."""
        tokens = tinker.ModelInput.from_ints(tokens_of(prompt))
        params = tinker.SamplingParams(**asdict(sampling_params or SamplingParams()))
        more["topk_sample_logprobs"] = topk_sample_logprobs
        done = self._client.sample(tokens, num_samples, params, include_prompt_logprobs, **more)
        return map_future(done.future(), lambda response: response)

    def compute_logprobs(self, prompt: Prompt, **more: Any) -> APIFuture[list[float | None]]:
        tokens = tinker.ModelInput.from_ints(tokens_of(prompt))
        done = self._client.compute_logprobs(tokens, **more)
        return map_future(done.future(), lambda logprobs: logprobs)

    def compute_logprobs_batch(
        self, prompts: Sequence[Prompt]
    ) -> APIFuture[list[list[float | None]]]:
        return gather([self.compute_logprobs(prompt) for prompt in prompts])

    def get_tokenizer(self) -> Any:
        return self._client.get_tokenizer()

    def get_base_model(self) -> str:
        return str(self._client.get_base_model())


def _datums(data: Data) -> list[tinker.Datum]:
    sent: list[tinker.Datum] = []
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise ValueError(f"data[{index}] is no Datum: rows and datums do not mix")
        inputs: dict[str, Any] = {}
        for name, values in datum.loss_fn_inputs.items():
            where = f"data[{index}]: {name}"
            if name == "target_tokens":
                inputs[name] = np.asarray(token_ids(values, where), dtype=np.int64)
            else:
                inputs[name] = np.asarray(numbers(values, where), dtype=np.float32)
        read = tinker.ModelInput.from_ints(datum.model_input.to_ints())
        sent.append(tinker.Datum(model_input=read, loss_fn_inputs=inputs))
    return sent


def _output(done: Any) -> ForwardBackwardOutput:
    rows = [
        {name: np.asarray(values.data, dtype=np.float32) for name, values in row.items()}
        for row in done.loss_fn_outputs
    ]
    return ForwardBackwardOutput(rows, dict(done.metrics))
