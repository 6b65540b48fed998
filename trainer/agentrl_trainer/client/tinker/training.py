"""One adapter in training on Tinker: converts our values to the SDK's and back.

``tinker.rows`` converts the trainer's own rows. ``mask`` and other inputs of ours in a client's
datum are for the local backend: Tinker names what it does not know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from agentrl_trainer.client.futures import Worker, chain, finished, map_future
from agentrl_trainer.client.naming import POINTER
from agentrl_trainer.client.rows import check_loss, metrics_of
from agentrl_trainer.client.tinker.rows import (
    TinkerPolicy,
    check_rows,
    folded,
    loss_of,
    native_config,
    stats_of,
    trained_logprobs,
    unweighted,
)
from agentrl_trainer.client.tinker.sampling import TinkerSampling
from agentrl_trainer.client.types import (
    AdamParams,
    Data,
    Datum,
    ForwardBackwardOutput,
    ModelInfo,
    OptimStepResponse,
    Options,
    SavedPath,
    numbers,
    whole_numbers,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss, Sums
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare

T = TypeVar("T")

_DISCARDED = "before-non-finite"  # the state to continue from after discarded gradients


class TinkerTraining:
    """Sends operations at once and in order; after a pending ``prepare``, or a pending step of
    training rows, they wait for it.

    Args:
        sampler: makes a sampling client, as ``TinkerService.sampler``.
        resume: makes the SDK's future of a client from a state's path.
    """

    is_local = False

    def __init__(
        self,
        sdk: Any,
        client: Any,
        folder: Path,
        name: str | None,
        worker: Worker,
        sampler: Callable[[str | None, str | None, Options], TinkerSampling],
        resume: Callable[[str], Any],
    ) -> None:
        self._sdk = sdk
        self._worker = worker
        self._make_sampler = sampler
        self._resume = resume
        self._added: list[Future[ForwardBackwardOutput]] = []  # of training rows, since the step
        self._reference: TinkerSampling | None = None
        self.continue_as(client, None)
        self.name = name or self.info.model_id.replace(":", "-")
        self.folder = folder / self.name

    def continue_as(self, client: Any, state: str | None) -> None:
        """Replace the SDK's client by one of the same base model, made from ``state``."""
        self._client = client
        self._state = state  # the newest one saved or loaded
        self.info: ModelInfo = client.get_info()  # has the same fields

    def _call(
        self, convert: Callable[[Any], T], method: str, *args: Any, **options: Any
    ) -> Future[T]:
        """Call a method of the SDK's client in its turn, and convert its result."""

        def start() -> Future[T]:
            done = getattr(self._client, method)(*args, **options)
            return map_future(done.future(), convert)

        return self._worker.in_turn(start)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None = 1.0,
        logprobs: bool = True,
        *,
        backward: bool = True,
    ) -> Future[ForwardBackwardOutput]:
        """``backward`` False leaves the gradients as they are."""
        if data and isinstance(data[0], TrainingRow):
            done = self._rows(data, loss_fn, config, normalize_by, logprobs, backward)
            if backward:
                self._added.append(done)
            return done
        if normalize_by != 1.0:
            raise ValueError(
                "normalize_by: Tinker sums over tokens; divide weights or advantages instead"
            )
        method = "forward_backward" if backward else "forward"
        return self._call(_output, method, _datums(self._sdk, data), loss_fn, config)

    def forward_backward_custom(
        self, data: Sequence[Datum], function: CustomLoss[Datum], tinker: Options
    ) -> Future[ForwardBackwardOutput]:
        return self._call(
            _output,
            "forward_backward_custom",
            _datums(self._sdk, data),
            lambda _, logprobs: function(data, logprobs),
            **tinker,
        )

    def _rows(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None,
        logprobs: bool,
        backward: bool,
    ) -> Future[ForwardBackwardOutput]:
        """Learn from training rows: by Tinker's loss if it has it, else by our formula on the
        log-probs that it returns."""
        started = time.perf_counter()
        given, config = cast(Sequence[TrainingRow], data), config or {}
        check_loss(loss_fn, config)
        check_rows(given)
        rows = [row for row in given if row.trained]
        if not rows:
            raise ValueError("data: none of the rows has a token to learn from")
        divisor = normalize_by or sum(row.trained for row in rows)
        seen: list[tuple[Tensor, Sums]] = []

        def loss(_: Any, computed: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            value, sums = loss_of(rows, computed, loss_fn, config)
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
            stats = stats_of(rows, *seen[0], divisor, started)
            metrics = done.metrics if backward else {}
            if not backward:
                stats = replace(stats, skipped_non_finite=False)  # no gradient to refuse
            outputs = trained_logprobs(given, computed) if logprobs else []
            return ForwardBackwardOutput(outputs, metrics | metrics_of(stats, loss_fn), stats)

        native = native_config(loss_fn, config, rows)
        if not backward:
            sent = [unweighted(row) for row in rows]
            done = self.forward_backward(sent, "cross_entropy", None, backward=False)
        elif native is None:
            done = self.forward_backward_custom([unweighted(row) for row in rows], loss, {})
        else:
            sent = [folded(row, divisor) for row in rows]
            done = self.forward_backward(sent, loss_fn, native)
        return map_future(done, report)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> Future[list[TrainingRow]]:
        policy = TinkerPolicy(self._row_logprobs, self._reference_logprobs)
        return self._worker.submit(lambda: prepare(policy, rows, settings))

    def _row_logprobs(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Compute the policy's log-probs; runs on the worker, so it calls the SDK directly."""
        sent = _datums(self._sdk, [unweighted(row) for row in rows])
        done = _output(self._client.forward(sent, "cross_entropy", None).result())
        return [row["logprobs"].tolist() for row in done.loss_fn_outputs]

    def _reference_logprobs(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        if self._reference is None:
            self._reference = self._make_sampler(None, self.info.model_data.model_name, {})
        found = self._reference.logprobs([row.tokens for row in rows], {}).result()
        return [[lp or 0.0 for lp in row[1:]] for row in found]

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]:
        # The SDK has other optimizers, whose parameters are sent as given.
        sent = self._sdk.AdamParams(**asdict(adam)) if isinstance(adam, AdamParams) else adam
        added, self._added = self._added, []

        def start() -> Future[OptimStepResponse]:
            # A service may apply gradients that are not finite, so it must not be asked to.
            if any(_not_finite(one) for one in added):
                self._discard_gradients()
                return finished(OptimStepResponse({"skipped_non_finite": 1.0}))
            return map_future(self._client.optim_step(sent).future(), _stepped)

        if added:
            return chain(self._worker.submit(start), lambda stepped: stepped)
        return self._worker.in_turn(start)

    def _discard_gradients(self) -> None:
        """Continue as a client made from a state: Tinker's API cannot clear gradients."""
        saved = self._client.save_state(_DISCARDED, overwrite=True).result()
        self.continue_as(self._resume(saved.path).result(), saved.path)

    def save_state(self, name: str, overwrite: bool, tinker: Options) -> Future[SavedPath]:
        def noted(saved: Any) -> SavedPath:
            self._state = saved.path
            return SavedPath(saved.path)

        return self._call(noted, "save_state", name, overwrite=overwrite, **tinker)

    def load_state(self, path: str, optimizer: bool, tinker: Options) -> Future[None]:
        def noted(_: Any) -> None:
            self._state = path

        method = "load_state_with_optimizer" if optimizer else "load_state"
        return self._call(noted, method, path, **tinker)

    def save_weights_for_sampler(self, name: str | Path, tinker: Options) -> Future[SavedPath]:
        def pointed(saved: Any) -> SavedPath:
            if isinstance(name, Path):
                name.mkdir(parents=True, exist_ok=True)
                pointer = {"path": saved.path, "state": self._state}
                (name / POINTER).write_text(json.dumps(pointer), encoding="utf-8")
            return SavedPath(saved.path)

        last = name.name if isinstance(name, Path) else name
        return self._call(pointed, "save_weights_for_sampler", last, **tinker)

    def sampler(self, tinker: Options) -> TinkerSampling:
        self._worker.idle()
        made = self._client.save_weights_and_get_sampling_client(**tinker)
        return TinkerSampling(self._sdk, made)

    def close(self) -> Future[None]:
        return finished(None)  # Tinker keeps models until their session ends

    def local(self, work: Callable[[Any], Any]) -> Future[Any]:
        raise ValueError("local is for the local backend; use what Tinker's own API has")

    def tokenizer(self) -> Any:
        return self._client.get_tokenizer()


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


def _output(done: Any) -> ForwardBackwardOutput:
    rows = [
        {name: np.asarray(values.data, dtype=np.float32) for name, values in row.items()}
        for row in done.loss_fn_outputs
    ]
    return ForwardBackwardOutput(rows, dict(done.metrics))


def _stepped(done: Any) -> OptimStepResponse:
    return OptimStepResponse(dict(done.metrics or {}))


def _not_finite(added: Future[ForwardBackwardOutput]) -> bool:
    """Wait for a step's loss; a failed one has told its caller why."""
    if added.exception() is not None:
        return False
    stats = added.result().stats
    return stats is not None and stats.skipped_non_finite
