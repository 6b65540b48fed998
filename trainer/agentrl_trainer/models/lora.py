"""Attach LoRA adapters to a base model, and write and read their PEFT folders.

An adapter on disk is always a standard PEFT folder (``adapter_config.json`` and
``adapter_model.safetensors``): the same folder serves the embedded sampler, vLLM and the user.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl_trainer.atomic_folder import atomic_folder
from agentrl_trainer.models.loading import BaseModel, ModelError
from agentrl_trainer.models.lora_targets import no_false_warnings, resolve_targets
from agentrl_trainer.models.moe import keep_weights_unmerged

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def lora_config(rank: int, alpha: float, targets: str | list[str] = "all-linear") -> LoraConfig:
    """Configure a LoRA (arXiv:2106.09685) without dropout.

    "all-linear" is every linear layer but the output embedding; in a mixture of experts it includes
    the experts and leaves out routers: see ``lora_targets``.
    """
    if rank < 1:
        raise ModelError(f"lora.rank: must be at least 1, not {rank}.")
    return LoraConfig(
        r=rank,
        # PEFT types alpha as an int but only ever divides it; whole numbers stay ints on disk
        # because vLLM reads the field as one.
        lora_alpha=int(alpha) if float(alpha).is_integer() else cast(Any, alpha),
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def attach_adapter(
    base: BaseModel | PeftModel, name: str, config: LoraConfig, seed: int
) -> PeftModel:
    """Add a fresh adapter: A drawn from ``seed`` alone, B zero, so it starts as the base model.

    The global random state is left as it was, and trainable weights are float32 for any base.

    Raises:
        ModelError: the name is taken or not usable, or the targets do not fit the model.
    """
    if "." in name or not name:
        raise ModelError(f"adapter: {name!r} is not usable as a name: no dots, and not empty.")
    if isinstance(base, PeftModel) and name in base.peft_config:
        raise ModelError(f"adapter: {name!r} is already attached to this model.")
    # get_base_model() needs an active adapter, and the last one may have been deleted.
    plain: Any = base.base_model.model if isinstance(base, PeftModel) else base.model
    # PEFT resolves targets in place: one configuration may serve many adapters.
    config = resolve_targets(copy.deepcopy(config), plain)
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus), warnings.catch_warnings(), no_false_warnings():
        # PEFT warns of names such as "a", which are part of its own "lora_".
        warnings.filterwarnings("ignore", message="Adapter name '.*' should not be contained")
        # It also reads an attribute that transformers renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(seed)
        if isinstance(base, PeftModel):
            # As PEFT itself does for the first adapter: the model's name as the user gave it.
            config.base_model_name_or_path = plain.name_or_path
            try:
                base.add_adapter(name, config)
            except ValueError as error:
                raise ModelError(f"adapter: {name!r} cannot join the others: {error}") from error
            attached = base
        else:
            # PEFT writes this into adapter_config.json, and would write a path for a local folder.
            base.model.__dict__["name_or_path"] = base.name
            attached = cast(PeftModel, get_peft_model(base.model, config, adapter_name=name))
        keep_weights_unmerged(attached)
        return attached


def save_adapter(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Write a PEFT folder; readers see either nothing or the whole of it.

    A folder that is already there is replaced.
    """
    tensors = {
        key: value.detach().cpu().contiguous()
        for key, value in _state(peft_model, adapter_name).items()
    }
    config = peft_model.peft_config[adapter_name].to_dict() | {"inference_mode": True}
    # Sets have no order (nor a JSON form): sorted, so that equal adapters give equal files.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    with atomic_folder(Path(folder)) as staging:
        save_file(tensors, str(staging / WEIGHTS_FILE), metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))


def load_adapter_weights(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Copy a saved adapter into the attached one, in place: optimizer references stay valid.

    Raises:
        ModelError: the folder holds no adapter, or one of other targets, rank or base model.
    """
    state = _state(peft_model, adapter_name)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"adapter: {path} does not exist; is {folder} a PEFT adapter folder?")
    loaded = load_file(str(path))
    for what, keys in (
        ("lacks", sorted(state.keys() - loaded.keys())),
        ("has unknown", sorted(loaded.keys() - state.keys())),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ModelError(
                f"adapter: {folder} {what} tensors {', '.join(keys[:3])}{more}, compared with "
                f"adapter {adapter_name!r}. Targets and base model must be those it was trained "
                "with."
            )
    for key, tensor in state.items():
        if tensor.shape != loaded[key].shape:
            raise ModelError(
                f"adapter: {key} in {folder} has shape {tuple(loaded[key].shape)}, but adapter "
                f"{adapter_name!r} has {tuple(tensor.shape)}. Rank, targets and base model must be "
                "those it was trained with."
            )
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(loaded[key])


def read_adapter(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Read a saved adapter's weights into the attached one; the folder may be PEFT's own.

    PEFT reads every file as if its names were a checkpoint's, and loses weights where transformers
    renames ``x`` into ``xs`` (Laguna's shared experts): it then looks for ``xss``. So where the
    file's names are the model's own, as in folders of ``save_adapter``, they are taken as they are.

    Raises:
        ModelError: they do not fit, or not all of them are there; some may have been read.
    """
    try:
        loaded: Any = peft_model.load_adapter(str(folder), adapter_name=adapter_name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"adapter: {folder} does not fit this model: {error}") from error
    if _state(peft_model, adapter_name).keys() == adapter_shapes(folder).keys():
        load_adapter_weights(peft_model, adapter_name, folder)
        return
    lacks = [name for name in loaded.missing_keys if f".{adapter_name}." in f"{name}."]
    for said, names in (("lacks", lacks), ("has unknown", loaded.unexpected_keys)):
        if names:
            raise ModelError(
                f"adapter: {folder} does not fit this model: it {said} {len(names)} tensors, such "
                f"as {names[0]}."
            )


def adapter_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Read tensor names and shapes of a saved adapter, from the header only."""
    with safe_open(str(Path(folder) / WEIGHTS_FILE), framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _state(peft_model: PeftModel, adapter_name: str) -> dict[str, Tensor]:
    if adapter_name not in peft_model.peft_config:
        known = ", ".join(sorted(peft_model.peft_config)) or "none"
        raise ModelError(
            f"adapter: {adapter_name!r} is not attached to this model (attached: {known})."
        )
    return get_peft_model_state_dict(
        peft_model, adapter_name=adapter_name, save_embedding_layers=False
    )
