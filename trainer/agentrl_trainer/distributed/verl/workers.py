"""verl's workers on the Ray cluster that this process has joined: start them, call them, end them.

verl's controller (https://github.com/verl-project/verl, ``RayWorkerGroup``) sets the workers up and
splits batches among them. Imported only when asked for: verl is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import torch
from peft import LoraConfig
from ray.util import remove_placement_group  # pyright: ignore[reportMissingImports]
from torch import nn
from verl.protocol import DataProtoFuture  # pyright: ignore[reportMissingImports]
from verl.single_controller.ray import (  # pyright: ignore[reportMissingImports]
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.trainer.config import CheckpointConfig  # pyright: ignore[reportMissingImports]
from verl.utils.device import (  # pyright: ignore[reportMissingImports]
    get_device_name,
    get_resource_name,
)
from verl.workers.config import (  # pyright: ignore[reportMissingImports]
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)

from agentrl_trainer.distributed.on_ray import placed, said_of
from agentrl_trainer.distributed.plan import RankError, SetupCall
from agentrl_trainer.distributed.verl.options import ULYSSES, check_options
from agentrl_trainer.distributed.verl.worker import VerlWorker
from agentrl_trainer.models.loading import BaseModel, load_facts
from agentrl_trainer.models.lora import model_without_weights
from agentrl_trainer.models.sources import ModelError, resolve_model

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass
class VerlWorkers:
    """Workers that hold the base model ``model``, which this process does not load.

    Raises:
        ModelError: verl cannot train the model as ``model_options`` say.
        ValueError: an option of verl cannot be given, see ``options.check_options``.
    """

    model: str
    model_options: Mapping[str, Any]
    """Of ``load_base``."""
    size: int = 1
    """How many workers there are; each has a GPU, unless VERL_PLATFORM names another platform."""
    nodes: int = 1
    """In how many equal parts they are placed; the workers of a part are on one node."""
    setup: Sequence[SetupCall] = ()
    """What each calls before anything else, in this order."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of verl's ``FSDPEngineConfig``."""
    of_model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of verl's ``HFModelConfig``."""
    _group: Any = field(default=None, init=False)
    _places: list[Any] = field(default_factory=list[Any], init=False)

    def __post_init__(self) -> None:
        if self.model_options.get("load_in_4bit"):
            raise ModelError("load_in_4bit: verl trains over a base in 16 or 32 bits.")
        dtype = self.model_options.get("dtype", "auto")
        check_options(self.size, self.nodes, dtype, self.engine, self.of_model)

    def load(self, load: Callable[..., BaseModel]) -> BaseModel:
        """Load tokenizer and shapes of the base model, in place of its weights."""
        return load(partial(_without_weights, self.model, self.model_options))

    @property
    def sequence_parts(self) -> int:
        """How many workers share each row."""
        return self.engine.get(ULYSSES, 1)

    @property
    def running(self) -> bool:
        return self._group is not None

    def start(self, lora: LoraConfig, gradient_checkpointing: bool) -> None:
        """Start the workers; each loads its part of the base model.

        Raises:
            RankError: the cluster has no place for them, or verl fails.
            ValueError: verl has no such option.
        """
        device = get_device_name()
        config = self._config(lora, gradient_checkpointing, on_cpu=device == "cpu")
        place = {"CPU": 1, **({} if device == "cpu" else {get_resource_name(): 1})}
        self._places = placed(self.size, place, nodes=self.nodes)
        each = [self.size // self.nodes] * self.nodes
        try:
            pool = RayResourcePool(each, device != "cpu", max_colocate_count=1)
            pool.pgs = self._places
            made = RayClassWithInitArgs(ray.remote(VerlWorker), config, self.setup)
            self._group = RayWorkerGroup(pool, made, device_name=device)
        except Exception as error:
            self.end()
            raise RankError(f"verl's workers did not start: {said_of(error)}") from error
        self.call("reset")

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of all workers.

        Raises:
            RankError: one of them failed; all of them have ended then.
        """
        try:
            found = getattr(self._group, name)(*args)
            return found.get() if isinstance(found, DataProtoFuture) else found
        except ray.exceptions.RayError as error:
            self.end()
            raise RankError(f"a worker of verl failed: {said_of(error)}") from error

    def check(self) -> None:
        """Do nothing: Ray tells of a worker that has ended when it is called next."""

    def end(self) -> None:
        """End the workers; ``start`` may start others."""
        for worker in self._group.workers if self._group else ():
            ray.kill(worker)
        for place in self._places:
            remove_placement_group(place)
        self._group, self._places = None, []

    def _config(
        self, lora: LoraConfig, gradient_checkpointing: bool, *, on_cpu: bool
    ) -> TrainingWorkerConfig:
        precision = _PRECISIONS.get(self.model_options.get("dtype", "auto"))
        precision = precision or ("fp32" if on_cpu else "bf16")
        engine = {
            "strategy": "fsdp2",
            "model_dtype": precision,
            "mixed_precision": {"param_dtype": precision, "reduce_dtype": "fp32"},
            "use_torch_compile": False,  # of the entropy, which is not computed
            **self.engine,
        }
        model = {
            # Padding is no part of the tokens that a micro-batch may have.
            "use_remove_padding": True,
            **self.of_model,
            "override_config": {
                "attn_implementation": "sdpa", **self.of_model.get("override_config", {})
            },
            "enable_gradient_checkpointing": gradient_checkpointing,
            "path": resolve_model(self.model),
            "trust_remote_code": bool(self.model_options.get("trust_remote_code")),
            "lora_rank": lora.r,
            "lora_alpha": lora.lora_alpha,
            "target_modules": _plain(lora.target_modules),
        }  # fmt: skip
        return TrainingWorkerConfig(
            model_type="language_model",
            model_config=_made(HFModelConfig, "verl.model", model),
            engine_config=_made(FSDPEngineConfig, "verl.engine", engine),
            optimizer_config=FSDPOptimizerConfig(total_training_steps=1, lr_warmup_steps=0),
            checkpoint_config=CheckpointConfig(),
        )


def _made(kind: Callable[..., Any], setting: str, options: Mapping[str, Any]) -> Any:
    try:
        return kind(**options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{setting}: verl refuses it: {error}") from error


def _plain(targets: Any) -> Any:
    return targets if isinstance(targets, str) else sorted(targets)


def _without_weights(name: str, options: Mapping[str, Any]) -> BaseModel:
    """Make a base model whose weights have shapes, and no memory."""
    told = {key: options[key] for key in ("trust_remote_code", "chat_template") if key in options}
    facts = load_facts(name, **told)
    if (model := model_without_weights(name)) is None:
        raise ModelError(
            f"model: verl cannot train {name!r}: it is no text model of transformers' own."
        )
    made: dict[int, nn.Parameter] = {}  # a tied weight is one
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            empty = nn.Parameter(torch.zeros(1).expand(weight.shape), requires_grad=False)
            setattr(module, key, made.setdefault(id(weight), empty))
    return BaseModel(
        tokenizer=facts.tokenizer, context_length=facts.context_length, eos_ids=facts.eos_ids,
        model=model.eval(), name=name, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
