"""ServiceClient: Tinker's entry point, which makes training and sampling clients.

    service = ServiceClient()
    training = service.create_lora_training_client("agentrl-tiny", rank=16)
    done = training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-3))
    print(done.result().metrics["loss:sum"])

``**tinker`` takes Tinker-only parameters: see ``parameters.TINKER_ONLY``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from agentrl_trainer.checkpoint import Restored
from agentrl_trainer.client.async_api import awaited
from agentrl_trainer.client.futures import APIFuture, finished
from agentrl_trainer.client.parameters import TINKER_ONLY, tinker_options
from agentrl_trainer.client.sampling import SamplingClient
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import (
    EndStatus,
    Folder,
    GetServerCapabilitiesResponse,
    LoraOptions,
    SavedPath,
)

if TYPE_CHECKING:
    from agentrl_trainer.client.local.service import LocalService
    from agentrl_trainer.client.tinker.service import TinkerService


class ServiceClient:
    """Makes training and sampling clients.

    Args:
        backend: "local" is this process, with torch; "tinker" is the official SDK
            (``pip install 'tinker>=0.38,<1'``), and the default if ``base_url`` is given.
        base_url: a server that speaks Tinker's protocol; None with "tinker" is Tinker itself.
        folder: where states and metrics are saved; default a new folder in ``runs/``.
        device, dtype: of the local model, see ``loading.load_base``.
        options: Tinker-only parameters, and for the local backend ``load_in_4bit``,
            ``trust_remote_code`` (``loading.load_base``), ``token_budget``,
            ``gradient_checkpointing`` and ``value`` (``learner.Learner``).
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        backend: Literal["local", "tinker"] | None = None,
        folder: Folder | None = None,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        kind = backend or ("local" if base_url is None else "tinker")
        if kind not in ("local", "tinker"):
            raise ValueError(f"backend must be 'local' or 'tinker', not {kind!r}")
        if kind == "local" and base_url is not None:
            raise ValueError("base_url is for backend='tinker'; the local one runs in this process")
        self._backend: LocalService | TinkerService
        if kind == "tinker":
            from agentrl_trainer.client.tinker.service import TinkerService

            self._backend = TinkerService(base_url, folder, options)
        else:
            from agentrl_trainer.client.local.service import LocalService

            ours = {k: v for k, v in options.items() if k not in TINKER_ONLY["ServiceClient"]}
            self._backend = LocalService(folder, device=device, dtype=dtype, **ours)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        *,
        name: str | None = None,
        alpha: float = 32.0,
        targets: str | list[str] | None = None,
        **tinker: Any,
    ) -> TrainingClient:
        """Make a new adapter over a base model, which all clients of a service share.

        Args:
            seed: None draws a new one each time.
            alpha, targets: LoRA's scale, and PEFT's target_modules in place of ``train_mlp`` and
                ``train_attn``; local backend only.
        """
        lora = LoraOptions(rank, seed, train_mlp, train_attn, alpha, targets)
        theirs = tinker_options("create_lora_training_client", tinker, self._backend)
        return TrainingClient(self._backend.train(base_model, lora, name, theirs), self._backend)

    create_lora_training_client_async = awaited(create_lora_training_client, on_thread=True)

    def create_training_client_from_state(
        self,
        path: Folder,
        base_model: str | None = None,
        *,
        name: str | None = None,
        **tinker: Any,
    ) -> TrainingClient:
        """Make a client from weights that ``save_state`` wrote, with a new optimizer.

        ``base_model`` replaces the one that was trained; its shapes must be the same.
        """
        theirs = tinker_options("create_training_client_from_state", tinker, self._backend)
        made = self._backend.train_from(str(path), base_model, False, name, theirs)
        return TrainingClient(made, self._backend)

    create_training_client_from_state_async = awaited(
        create_training_client_from_state, on_thread=True
    )

    def create_training_client_from_state_with_optimizer(
        self,
        path: Folder,
        base_model: str | None = None,
        *,
        name: str | None = None,
        **tinker: Any,
    ) -> TrainingClient:
        """Make a client that continues exactly where ``save_state`` was called."""
        theirs = tinker_options(
            "create_training_client_from_state_with_optimizer", tinker, self._backend
        )
        made = self._backend.train_from(str(path), base_model, True, name, theirs)
        return TrainingClient(made, self._backend)

    create_training_client_from_state_with_optimizer_async = awaited(
        create_training_client_from_state_with_optimizer, on_thread=True
    )

    def create_sampling_client(
        self, model_path: Folder | None = None, base_model: str | None = None, **tinker: Any
    ) -> SamplingClient:
        """Sample with saved weights (``save_weights_for_sampler``), or with a base model."""
        if (model_path is None) == (base_model is None):
            raise ValueError("give either model_path or base_model")
        path = None if model_path is None else str(model_path)
        theirs = tinker_options("create_sampling_client", tinker, self._backend)
        return SamplingClient(self._backend.sampler(path, base_model, theirs))

    create_sampling_client_async = awaited(create_sampling_client, on_thread=True)

    def save_checkpoint(
        self, root: Folder, step: int, *, meta: Mapping[str, Any] | None = None, keep: int = 2
    ) -> APIFuture[SavedPath]:
        """Save all adapters, their optimizers and the random states atomically as one checkpoint
        (``agentrl_trainer.checkpoint``).

        Over Tinker it holds the paths of states (``save_state``), which stay there.
        """
        return APIFuture(self._backend.save_checkpoint(Path(root), step, meta or {}, keep))

    def restore_checkpoint(self, root: Folder) -> APIFuture[Restored]:
        """Restore the newest whole checkpoint below ``root``, if there is one.

        The same clients must exist as when it was saved. The result tells which checkpoint it is,
        and which torn ones were passed over.
        """
        return APIFuture(self._backend.restore_checkpoint(Path(root)))

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the known base models. Locally any causal language model may be trained."""
        return self._backend.capabilities()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await asyncio.to_thread(self.get_server_capabilities)

    def supported_models(self) -> list[str]:
        """Return the names of ``get_server_capabilities``."""
        return [model.model_name for model in self.get_server_capabilities().supported_models]

    def close(self, status: EndStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Run the operations called so far, then end the session; its clients are of no use after.

        ``status`` and ``detail`` tell Tinker how it ended. Waits, though it returns a future.
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
        status: EndStatus = "success"
        if error is not None:
            status = "errored" if isinstance(error, Exception) else "interrupted"
        self.close(status, repr(error) if status == "errored" else None)
