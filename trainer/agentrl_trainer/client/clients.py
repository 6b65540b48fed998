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
from agentrl_trainer.client.async_api import awaited, made, submitted
from agentrl_trainer.client.backend import (
    Data,
    EndStatus,
    SamplingBackend,
    ServiceBackend,
    TrainingBackend,
)
from agentrl_trainer.client.futures import APIFuture, finished, gather, map_future, wait
from agentrl_trainer.client.types import (
    AdamParams,
    Array,
    Datum,
    Folder,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    LoraOptions,
    ModelInfo,
    ModelInput,
    OptimStepResponse,
    SampleOptions,
    SampleResponse,
    SamplerOptions,
    SamplingParams,
    SavedPath,
    SaveOptions,
    StateOptions,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.prepare_batch import UpdateSettings

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
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """``num_samples`` continuations of a prompt, with their log-probs at temperature 1.

        ``prompt_logprobs_last_n``: of the prompt only the log-probs of so many last tokens, None
        for those before. ``topk_prompt_logprobs``, ``target_prompt_logprobs`` and
        ``prompt_alt_tokens_k`` are Tinker's own; the local backend refuses them.

        Raises ValueError for a prompt without tokens and parameters out of range.
        """
        tokens = tokens_of(prompt)
        if prompt_logprobs_last_n is not None and not include_prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs=True")
        _check_last(prompt_logprobs_last_n, tokens)
        options = SampleOptions(
            num_samples,
            sampling_params or SamplingParams(),
            include_prompt_logprobs,
            prompt_logprobs_last_n,
            topk_sample_logprobs,
            topk_prompt_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
        )
        return APIFuture(self._backend.sample(tokens, options))

    sample_async = awaited(sample)

    def sample_batch(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        include_prompt_logprobs: bool = False,
        topk_sample_logprobs: int = 0,
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
        asked = [
            self.sample(
                prompt,
                num_samples,
                params,
                include_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]
        return APIFuture(gather([one.future() for one in asked]))

    sample_batch_async = awaited(sample_batch)

    def compute_logprobs(
        self, prompt: Prompt, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-prob of each token given those before it; None for the first.

        ``prompt_logprobs_last_n``: only of so many last tokens, None for those before.
        """
        tokens = tokens_of(prompt)
        _check_last(prompt_logprobs_last_n, tokens)
        rows = self._backend.logprobs([tokens], prompt_logprobs_last_n)
        return APIFuture(map_future(rows, lambda found: found[0]))

    compute_logprobs_async = awaited(compute_logprobs)

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

    get_base_model_async = submitted(get_base_model)


class TrainingClient(_Made):
    """One adapter in training. Operations are done in the order in which they were asked for."""

    def __init__(self, backend: TrainingBackend, service: ServiceBackend) -> None:
        self._backend = backend
        self._service = service
        self.history: list[dict[str, float]] = []
        """What ``log`` was given."""

    # ---- learning

    def forward(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """What ``forward_backward`` would give, loss and metrics, without a gradient.

        The outputs hold the log-probs of the targets: locally of those that count in the loss, and
        of ``cross_entropy`` all of them.

        ``data`` may, here and in ``forward_backward``, be the trainer's own rows
        (``agentrl_trainer.data.packing.TrainingRow``).
        """
        return APIFuture(self._backend.forward(data, loss_fn, loss_fn_config))

    forward_async = submitted(forward)

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
        by the number of tokens that count in ``data``, and ``loss:sum`` then is that mean. Tinker
        divides rows only, not its own datums.
        ``logprobs`` False spares fetching them: ``loss_fn_outputs`` is empty then.

        Raises ValueError at once, naming datum, field and fix, for data that no loss can take.
        """
        return APIFuture(
            self._backend.forward_backward(data, loss_fn, loss_fn_config, normalize_by, logprobs)
        )

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss[Datum],
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """``forward_backward`` of any function ``(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` are torch tensors [T], one for each datum. The function is called on the thread
        that trains, in its turn; it must not wait for another operation. ``loss_type_input`` says
        what the function takes; log-probs are all there is.
        """
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function of (data, logprobs), not {loss_fn!r}")
        if loss_type_input not in (None, "logprobs"):
            raise ValueError(f"loss_type_input must be 'logprobs', not {loss_type_input!r}")
        return APIFuture(self._backend.forward_backward_custom(data, loss_fn))

    forward_backward_custom_async = submitted(forward_backward_custom)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> APIFuture[list[TrainingRow]]:
        """The rows with all that depends on the policy as it is now, before an update by them:
        log-probs of references, values, GAE's advantages."""
        return APIFuture(self._backend.prepare(rows, settings))

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the gathered gradients with AdamW, and forget them.

        Where one of them is not finite nothing changes, and ``skipped_non_finite`` is 1.
        ``adam_params`` is the older name of ``optim_params``; neither: ``AdamParams()``.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, which is its older name, not both")
        chosen = optim_params if optim_params is not None else adam_params
        return APIFuture(self._backend.optim_step(AdamParams() if chosen is None else chosen))

    optim_step_async = submitted(optim_step)

    # ---- weights

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SavedPath]:
        """Save weights and optimizer, to go on from: whole or not at all.

        ``ttl_seconds`` is when Tinker deletes it; a local folder stays. ``user_metadata`` is kept
        with it, locally in its ``meta.json``.
        """
        options = SaveOptions(ttl_seconds, user_metadata)
        return APIFuture(self._backend.save_state(name, overwrite, options))

    save_state_async = submitted(save_state)

    def load_state(self, path: Folder, weights_access_token: str | None = None) -> APIFuture[None]:
        """Load weights that ``save_state`` wrote; the optimizer begins anew.

        ``weights_access_token`` is for another account's weights on Tinker; here and below.
        """
        return APIFuture(self._backend.load_state(str(path), False, weights_access_token))

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: Folder, weights_access_token: str | None = None
    ) -> APIFuture[None]:
        """Load what ``save_state`` wrote, to the last bit."""
        return APIFuture(self._backend.load_state(str(path), True, weights_access_token))

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_for_sampler(
        self,
        name: str | Path,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SavedPath]:
        """Save the weights to sample with: locally a PEFT folder, which vLLM serves as well.

        A ``Path`` in place of a name says where; on Tinker its last part is the name, and a file
        there, ``tinker.json``, says where the weights are. ``ttl_seconds`` and
        ``user_metadata`` are for Tinker: a PEFT folder has no place for them.
        """
        options = SaveOptions(ttl_seconds, user_metadata)
        return APIFuture(self._backend.save_weights_for_sampler(name, options))

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot", "inflight"] = "snapshot",
    ) -> SamplingClient:
        """Sample with the weights as they are after what was asked for so far.

        They are gone with the client: nothing of them stays on disk. ``name`` means nothing, as on
        Tinker. ``retry_config``, ``record_stability_info`` and the kind "inflight" are Tinker's;
        the local backend refuses the last.
        """
        options = SamplerOptions(retry_config, record_stability_info, kind)
        return SamplingClient(self._backend.sampler(options))

    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self, model_path: Folder, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """``ServiceClient.create_sampling_client`` of saved weights."""
        options = SamplerOptions(retry_config, record_stability_info)
        return SamplingClient(self._service.sampler(str(model_path), None, options))

    create_sampling_client_async = made(create_sampling_client)

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

    get_info_async = submitted(get_info)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""
        return self._backend.tokenizer()

    def close(self) -> APIFuture[None]:
        """Forget the adapter when what was asked for so far is done, and free its name.

        What was saved stays. On Tinker adapters go with their session.
        """
        return APIFuture(self._backend.close())


class ServiceClient:
    """Where training and sampling clients come from.

    ``backend`` local: this process, with torch; ``folder`` is where states and metrics go, by
    default a new one in ``runs/``. Its ``options`` are ``load_in_4bit`` and
    ``trust_remote_code`` (``model.load_base``), and those of ``learner.Learner``: ``token_budget``,
    ``gradient_checkpointing``, ``value``.

    ``backend`` tinker: the official SDK (``pip install 'agentrl[tinker]'``), on Tinker itself or
    whatever speaks its protocol at ``base_url``; the default where a ``base_url`` is given. The
    first parameters, from ``user_metadata`` to ``default_headers_overrides``, are for it alone.
    What is for the local backend only says so, and docs/client.md lists it.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        backend: Literal["local", "tinker"] | None = None,
        folder: Folder | None = None,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        if isinstance(user_metadata, str):
            raise ValueError("the first parameter is user_metadata, as Tinker's: name base_url")
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

            self._backend = HostedService(
                base_url,
                api_key,
                folder,
                user_metadata=user_metadata,
                project_id=project_id,
                display_name=display_name,
                default_headers_overrides=default_headers_overrides,
                **options,
            )

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool | None = None,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: Any = None,
        *,
        name: str | None = None,
        alpha: float = 32.0,
        targets: str | list[str] | None = None,
    ) -> TrainingClient:
        """A fresh adapter over a base model; several of one service share it.

        ``seed`` None: a new one each time. ``train_unembed`` None: where the backend can, which is
        Tinker; locally True is refused. ``optimizer``: Tinker's configuration of one; locally there
        is AdamW. ``alpha`` and ``targets`` (PEFT's target_modules, in place of ``train_mlp`` and
        ``train_attn``) are for the local backend.
        """
        options = LoraOptions(
            rank,
            seed,
            train_mlp,
            train_attn,
            train_unembed,
            alpha,
            targets,
            user_metadata,
            optimizer,
        )
        return TrainingClient(self._backend.train(base_model, options, name), self._backend)

    create_lora_training_client_async = made(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: Folder,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
        *,
        name: str | None = None,
    ) -> TrainingClient:
        """A client that begins with weights which ``save_state`` wrote, and a new optimizer.

        ``base_model``: in place of the one that was trained; its shapes must be the same.
        """
        options = StateOptions(base_model, user_metadata, weights_access_token, optimizer)
        client = self._backend.train_from(str(path), optimizer=False, options=options, name=name)
        return TrainingClient(client, self._backend)

    create_training_client_from_state_async = made(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: Folder,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        name: str | None = None,
    ) -> TrainingClient:
        """A client that goes on exactly where ``save_state`` was called."""
        options = StateOptions(base_model, user_metadata, weights_access_token)
        client = self._backend.train_from(str(path), optimizer=True, options=options, name=name)
        return TrainingClient(client, self._backend)

    create_training_client_from_state_with_optimizer_async = made(
        create_training_client_from_state_with_optimizer
    )

    def create_sampling_client(
        self,
        model_path: Folder | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Of saved weights (``save_weights_for_sampler``), or of a base model as it is.

        ``retry_config`` and ``record_stability_info`` are Tinker's.
        """
        if (model_path is None) == (base_model is None):
            raise ValueError("give either model_path or base_model")
        path = None if model_path is None else str(model_path)
        options = SamplerOptions(retry_config, record_stability_info)
        return SamplingClient(self._backend.sampler(path, base_model, options))

    create_sampling_client_async = made(create_sampling_client)

    def save_checkpoint(
        self,
        root: Folder,
        step: int,
        *,
        meta: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> APIFuture[SavedPath]:
        """All adapters of this service, their optimizers and the random states, as one checkpoint
        that is whole or does not exist (``agentrl_trainer.checkpoint``). Over Tinker it holds the
        paths of states (``save_state``), which stay there."""
        return APIFuture(self._backend.save_checkpoint(Path(root), step, meta or {}, keep))

    def restore_checkpoint(self, root: Folder) -> APIFuture[Restored]:
        """Go back to the newest whole checkpoint below ``root``, if there is one.

        The same clients must have been made as when it was saved. What comes back says which it
        was, and which were passed over because they are torn.
        """
        return APIFuture(self._backend.restore_checkpoint(Path(root)))

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Base models known to work. Locally any other causal language model may be asked for."""
        return self._backend.capabilities()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await asyncio.to_thread(self.get_server_capabilities)

    def supported_models(self) -> list[str]:
        """The names of ``get_server_capabilities``."""
        return [model.model_name for model in self.get_server_capabilities().supported_models]

    def close(self, status: EndStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """End the session. What was asked for is done before; clients are of no use after.

        ``status`` and ``detail`` tell Tinker how it ended. Waits, though a future comes back.
        """
        self._backend.close(status, detail)
        return APIFuture(finished(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            self.close("errored", f"{type(error).__name__}: {error}")
        else:  # KeyboardInterrupt
            self.close("interrupted")


def tokens_of(prompt: Prompt) -> list[int]:
    made = prompt if hasattr(prompt, "to_ints") else ModelInput.from_ints(prompt)
    tokens = made.to_ints()
    if not tokens:
        raise ValueError("the prompt has no tokens")
    return tokens


def _check_last(count: int | None, tokens: list[int]) -> None:
    if count is not None and not 1 <= count < len(tokens):
        raise ValueError(
            f"prompt_logprobs_last_n must be in 1..{len(tokens) - 1}, the tokens that have one "
            f"before them; not {count}"
        )
