"""ServiceClient, TrainingClient and SamplingClient: Tinker's, over a backend.

Knows what a user calls and what comes back; the backends know how.

    service = ServiceClient()
    training = service.create_lora_training_client("agentrl-tiny", rank=16)
    done = training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-3))
    print(done.result().metrics["loss:sum"])

Operations return at once and are done in order, so ask for several before you wait for the first.
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from agentrl_trainer.checkpoint import Restored
from agentrl_trainer.client.backend import (
    CustomLoss,
    Data,
    SamplingBackend,
    ServiceBackend,
    TrainingBackend,
)
from agentrl_trainer.client.futures import APIFuture, gather, map_future, wait
from agentrl_trainer.client.types import (
    AdamParams,
    Array,
    Datum,
    Folder,
    ForwardBackwardOutput,
    LoraOptions,
    ModelInfo,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SavedPath,
)
from agentrl_trainer.learner import Learner
from agentrl_trainer.losses import LossConfig

T = TypeVar("T")

Prompt = ModelInput | Array
"""Tokens; a ModelInput or plain ids."""


class _Made:
    """A client is its own future: newer versions of Tinker's SDK return futures of clients."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


class SamplingClient(_Made):
    """Samples with the weights that it was made for, whatever is trained meanwhile."""

    def __init__(self, backend: SamplingBackend) -> None:
        self._backend = backend

    def result(self, timeout: float | None = None) -> Self:
        """Waits for its weights. Sampling may be asked for before."""
        wait(self._backend.ready, timeout)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from APIFuture(self._backend.ready).__await__()
        return self

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_sample_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """``num_samples`` continuations of a prompt, with their log-probs at temperature 1.

        Raises ValueError for a prompt without tokens and parameters out of range.
        """
        return APIFuture(
            self._backend.sample(
                tokens_of(prompt),
                num_samples,
                sampling_params or SamplingParams(),
                include_prompt_logprobs,
                topk_sample_logprobs,
            )
        )

    async def sample_async(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_sample_logprobs: int = 0,
    ) -> SampleResponse:
        return await self.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_sample_logprobs
        )

    def sample_batch(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> APIFuture[list[SampleResponse]]:
        """``sample`` for many prompts at once, in one batch; responses in their order.

        ``sampling_params`` are those of all, or one for each prompt.
        """
        shared = sampling_params or SamplingParams()
        each = [shared] * len(prompts) if isinstance(shared, SamplingParams) else list(shared)
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(each)} for {len(prompts)} prompts; give one for each, or "
                "one for all"
            )
        return APIFuture(
            gather(
                [
                    self.sample(prompt, num_samples, params).future()
                    for prompt, params in zip(prompts, each, strict=True)
                ]
            )
        )

    async def sample_batch_async(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[SampleResponse]:
        return await self.sample_batch(prompts, num_samples, sampling_params)

    def compute_logprobs(self, prompt: Prompt) -> APIFuture[list[float | None]]:
        """The log-prob of each token given those before it; None for the first."""
        rows = self._backend.logprobs([tokens_of(prompt)])
        return APIFuture(map_future(rows, lambda found: found[0]))

    async def compute_logprobs_async(self, prompt: Prompt) -> list[float | None]:
        return await self.compute_logprobs(prompt)

    def compute_logprobs_batch(
        self, prompts: Sequence[Prompt]
    ) -> APIFuture[list[list[float | None]]]:
        """``compute_logprobs`` of many at once: what they share is computed once."""
        return APIFuture(self._backend.logprobs([tokens_of(prompt) for prompt in prompts]))

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""
        return self._backend.tokenizer()

    def get_base_model(self) -> str:
        return self._backend.base_model


class TrainingClient(_Made):
    """One adapter in training. Operations are done in the order in which they were asked for."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend
        self.history: list[dict[str, float]] = []
        """What ``log`` was given."""

    # ---- learning

    def forward(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """The log-probs of the targets, and no gradient.

        ``data`` may, here and below, be the trainer's own rows (``agentrl_trainer.batches.Datum``)
        where the backend is the local one.
        """
        return APIFuture(self._backend.forward(data, loss_fn, loss_fn_config))

    async def forward_async(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
        *,
        normalize_by: float | None = 1.0,
        logprobs: bool = True,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of the loss to what ``optim_step`` will apply.

        The loss is a sum over tokens (``losses``), as in Tinker, divided by ``normalize_by``; None:
        by the number of tokens that count in ``data``, and ``loss:sum`` then is that mean.
        ``logprobs`` False spares fetching them: ``loss_fn_outputs`` is empty then.

        Raises ValueError at once, naming datum, field and fix, for data that no loss can take.
        """
        return APIFuture(
            self._backend.forward_backward(data, loss_fn, loss_fn_config, normalize_by, logprobs)
        )

    async def forward_backward_async(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
        *,
        normalize_by: float | None = 1.0,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config, normalize_by=normalize_by)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> APIFuture[ForwardBackwardOutput]:
        """``forward_backward`` of any function ``(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` are torch tensors [T], one for each datum. The function is called on the thread
        that trains, in its turn; it must not wait for another operation.
        """
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function of (data, logprobs), not {loss_fn!r}")
        return APIFuture(self._backend.forward_backward_custom(data, loss_fn))

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, loss_fn)

    def optim_step(self, adam_params: AdamParams | None = None) -> APIFuture[OptimStepResponse]:
        """Apply the gathered gradients with AdamW, and forget them.

        Where one of them is not finite nothing changes, and ``skipped_non_finite`` is 1.
        """
        return APIFuture(self._backend.optim_step(adam_params or AdamParams()))

    async def optim_step_async(
        self, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(adam_params)

    # ---- weights

    def save_state(self, name: str, overwrite: bool = False) -> APIFuture[SavedPath]:
        """Save weights and optimizer, to go on from: whole or not at all."""
        return APIFuture(self._backend.save_state(name, overwrite))

    async def save_state_async(self, name: str, overwrite: bool = False) -> APIFuture[SavedPath]:
        return self.save_state(name, overwrite)

    def load_state(self, path: Folder) -> APIFuture[None]:
        """Load weights that ``save_state`` wrote; the optimizer begins anew."""
        return APIFuture(self._backend.load_state(str(path), optimizer=False))

    async def load_state_async(self, path: Folder) -> APIFuture[None]:
        return self.load_state(path)

    def load_state_with_optimizer(self, path: Folder) -> APIFuture[None]:
        """Load what ``save_state`` wrote, to the last bit."""
        return APIFuture(self._backend.load_state(str(path), optimizer=True))

    async def load_state_with_optimizer_async(self, path: Folder) -> APIFuture[None]:
        return self.load_state_with_optimizer(path)

    def save_weights_for_sampler(self, name: str | Path) -> APIFuture[SavedPath]:
        """Save the weights to sample with: locally a PEFT folder, which vLLM serves as well.

        A ``Path`` in place of a name says where.
        """
        return APIFuture(self._backend.save_weights_for_sampler(name))

    async def save_weights_for_sampler_async(self, name: str) -> APIFuture[SavedPath]:
        return self.save_weights_for_sampler(name)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """Sample with the weights as they are after what was asked for so far.

        They are gone with the client: nothing of them stays on disk.
        """
        return SamplingClient(self._backend.sampler())

    async def save_weights_and_get_sampling_client_async(self) -> SamplingClient:
        return await self.save_weights_and_get_sampling_client()

    # ---- the rest

    def log(
        self, metrics: Mapping[str, float] | None = None, step: int | None = None, **named: float
    ) -> None:
        """Keep named numbers, in ``history`` and as a line of ``metrics.jsonl`` in ``folder``."""
        row: dict[str, float] = {} if step is None else {"step": step}
        for name, value in {**(metrics or {}), **named}.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                item = getattr(value, "item", None)  # a 0-d array or tensor
                value = item() if callable(item) else value
            if not isinstance(value, numbers.Real):
                raise ValueError(f"log: {name} must be a number, not {value!r}")
            row[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self.history.append(row)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def local(self, work: Callable[[Learner], T]) -> APIFuture[T]:
        """Anything else that the learner can do, in its turn; of the local backend only."""
        return APIFuture(self._backend.local(work))

    @property
    def folder(self) -> Path:
        """Where states, sampler weights and metrics go."""
        return self._backend.folder

    @property
    def model_id(self) -> str:
        return self._backend.info.model_id

    def get_info(self) -> ModelInfo:
        return self._backend.info

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""
        return self._backend.tokenizer()


class ServiceClient:
    """Where training and sampling clients come from.

    ``backend`` local: this process, with torch; ``folder`` is where states and metrics go, by
    default a new one in ``runs/``. Its ``options`` are ``load_in_4bit`` (``model.load_base``) and
    those of ``learner.Learner``: ``token_budget``, ``gradient_checkpointing``, ``value``.

    ``backend`` tinker: the official SDK (``pip install 'agentrl[tinker]'``), on Tinker itself or
    whatever speaks its protocol at ``base_url``; the default where a ``base_url`` is given. What
    is for the local backend only says so; docs/client.md lists it. ``agentrl train`` is.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        backend: Literal["local", "tinker"] | None = None,
        folder: Folder | None = None,
        device: str = "auto",
        dtype: str = "auto",
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        kind = backend or ("local" if base_url is None else "tinker")
        if kind not in ("local", "tinker"):
            raise ValueError(f"backend must be 'local' or 'tinker', not {kind!r}")
        if kind == "local" and base_url is not None:
            raise ValueError("base_url is for backend='tinker'; the local one runs in this process")
        self._backend: ServiceBackend
        if kind == "local":
            from agentrl_trainer.client.local import LocalService

            self._backend = LocalService(folder, device=device, dtype=dtype, **options)
        else:
            from agentrl_trainer.client.hosted import HostedService

            self._backend = HostedService(base_url, api_key, folder, **options)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        alpha: float = 32.0,
        targets: str | list[str] | None = None,
    ) -> TrainingClient:
        """A fresh adapter over a base model; several of one service share it.

        ``seed`` None: a new one each time. ``alpha`` and ``targets`` (PEFT's target_modules, in
        place of ``train_mlp`` and ``train_attn``) are for the local backend, where the output
        embedding cannot be trained (``train_unembed``).
        """
        options = LoraOptions(
            rank, seed, train_mlp, train_attn, train_unembed, alpha, targets, user_metadata
        )
        return TrainingClient(self._backend.train(base_model, options, name))

    async def create_lora_training_client_async(
        self, base_model: str, rank: int = 32, seed: int | None = None, **options: Any
    ) -> TrainingClient:
        return await asyncio.to_thread(
            self.create_lora_training_client, base_model, rank, seed, **options
        )

    def create_training_client_from_state(
        self, path: Folder, *, name: str | None = None
    ) -> TrainingClient:
        """A client that begins with weights which ``save_state`` wrote, and a new optimizer."""
        return TrainingClient(self._backend.train_from(str(path), optimizer=False, name=name))

    async def create_training_client_from_state_async(self, path: Folder) -> TrainingClient:
        return await asyncio.to_thread(self.create_training_client_from_state, path)

    def create_training_client_from_state_with_optimizer(
        self, path: Folder, *, name: str | None = None
    ) -> TrainingClient:
        """A client that goes on exactly where ``save_state`` was called."""
        return TrainingClient(self._backend.train_from(str(path), optimizer=True, name=name))

    async def create_training_client_from_state_with_optimizer_async(
        self, path: Folder
    ) -> TrainingClient:
        return await asyncio.to_thread(self.create_training_client_from_state_with_optimizer, path)

    def create_sampling_client(
        self, model_path: Folder | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Of saved weights (``save_weights_for_sampler``), or of a base model as it is."""
        if (model_path is None) == (base_model is None):
            raise ValueError("give either model_path or base_model")
        path = None if model_path is None else str(model_path)
        return SamplingClient(self._backend.sampler(path, base_model))

    async def create_sampling_client_async(
        self, model_path: Folder | None = None, base_model: str | None = None
    ) -> SamplingClient:
        client = await asyncio.to_thread(self.create_sampling_client, model_path, base_model)
        return await client

    def save_checkpoint(
        self,
        root: Folder,
        step: int,
        *,
        meta: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> APIFuture[SavedPath]:
        """All adapters of this service, their optimizers and the random states, as one checkpoint
        that is whole or does not exist (``agentrl_trainer.checkpoint``); local backend only."""
        return APIFuture(self._backend.save_checkpoint(Path(root), step, meta or {}, keep))

    def restore_checkpoint(self, root: Folder) -> APIFuture[Restored]:
        """Go back to the newest whole checkpoint below ``root``, if there is one.

        The same clients must have been made as when it was saved. What comes back says which it
        was, and which were passed over because they are torn.
        """
        return APIFuture(self._backend.restore_checkpoint(Path(root)))

    def supported_models(self) -> list[str]:
        """Base models known to work. Locally any other causal language model may be asked for."""
        return self._backend.models()

    def close(self) -> None:
        """End the threads. What was asked for is done before; clients are of no use after."""
        self._backend.close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._backend.close(error)


def tokens_of(prompt: Prompt) -> list[int]:
    made = prompt if hasattr(prompt, "to_ints") else ModelInput.from_ints(prompt)
    tokens = made.to_ints()
    if not tokens:
        raise ValueError("the prompt has no tokens")
    return tokens
