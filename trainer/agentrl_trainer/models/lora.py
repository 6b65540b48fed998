"""Attach LoRA adapters to a base model, and write and read their PEFT folders.

An adapter on disk is always a standard PEFT folder (``adapter_config.json`` and
``adapter_model.safetensors``): the same folder serves the embedded sampler, vLLM and the user.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl_trainer.checkpoint import atomic_folder
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora_product import join_loras
from agentrl_trainer.models.lora_targets import no_false_warnings, resolve_targets
from agentrl_trainer.models.moe import keep_weights_unmerged
from agentrl_trainer.models.saved_lora import CONFIG_FILE, WEIGHTS_FILE
from agentrl_trainer.models.sources import ModelError, resolve_model

_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)B(?![A-Za-z0-9])", re.IGNORECASE)
_DORA = "lora_magnitude_vector"
HEAD_KEY = "score.weight"
"""A reward model's head [1, hidden], named as by transformers' models for sequence classification.
"""
_SAVED_HEAD = f"base_model.model.{HEAD_KEY}"


def lora_config(rank: int, alpha: float, targets: str | list[str] = "all-linear") -> LoraConfig:
    """Configure a LoRA (arXiv:2106.09685) without dropout.

    "all-linear" is every linear layer but the output embedding; in a mixture of experts it includes
    the experts and leaves out routers: see ``lora_targets``.
    """
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
    ``config`` is for this adapter alone: its targets are resolved in place.

    Raises:
        ModelError: the name is taken or not usable, or the targets do not fit the model.
    """
    if "." in name or not name:
        raise ModelError(f"adapter: {name!r} is not usable as a name: no dots, and not empty.")
    if isinstance(base, PeftModel) and name in base.peft_config:
        raise ModelError(f"adapter: {name!r} is already attached to this model.")
    # get_base_model() needs an active adapter, and the last one may have been deleted.
    plain: Any = base.base_model.model if isinstance(base, PeftModel) else base.model
    config = resolve_targets(config, plain)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), no_false_warnings():
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
            plain.__dict__["name_or_path"] = base.name
            attached = cast(PeftModel, get_peft_model(plain, config, adapter_name=name))
        keep_weights_unmerged(attached)
        join_loras(attached)
        return attached


def attach_saved_adapter(peft_model: PeftModel, name: str, folder: str | Path) -> None:
    """Attach the adapter of a PEFT folder, without dropout; its rank may differ."""
    with no_false_warnings():
        config = cast(LoraConfig, PeftConfig.from_pretrained(str(folder)))
        config.lora_dropout = 0.0
        peft_model.add_adapter(name, config)
    load_adapter_weights(peft_model, name, folder)


def adapter_parameters(model: PeftModel, name: str) -> dict[str, nn.Parameter]:
    """Find an adapter's tensors, by keys that do not contain its name.

    The keys are those of PEFT's ``get_peft_model_state_dict``. That leaves out what another
    adapter's name is a part of: of an adapter beside one named "mlp", all of the MLPs.
    """
    # ...q_proj.lora_A.<name>.weight, or ...lora_embedding_A.<name>; DoRA's file has no ".weight"
    own = re.compile(rf"(.*lora_\w+)\.{re.escape(name)}(|\.weight|\.bias)")
    named = ((own.fullmatch(key), parameter) for key, parameter in model.named_parameters())
    found = {match[1] + match[2]: parameter for match, parameter in named if match}
    return {key.replace(f"{_DORA}.weight", _DORA): parameter for key, parameter in found.items()}


def save_adapter(
    peft_model: PeftModel, adapter_name: str, folder: str | Path, head: Tensor | None = None
) -> None:
    """Write a PEFT folder; readers see either nothing or the whole of it.

    A folder that is already there is replaced. ``head``: of a reward model. The folder is then one
    that PEFT's ``AutoPeftModelForSequenceClassification`` loads with ``num_labels=1``.
    """
    state = adapter_parameters(peft_model, adapter_name)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    config = peft_model.peft_config[adapter_name].to_dict() | {"inference_mode": True}
    if head is not None:
        tensors[_SAVED_HEAD] = head.detach().cpu().contiguous()
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    # Sets have no order (nor a JSON form): sorted, so that equal adapters give equal files.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    with atomic_folder(Path(folder)) as staging:
        save_file(tensors, str(staging / WEIGHTS_FILE), metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))


def load_adapter_weights(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Copy a saved adapter into the attached one, in place: optimizer references stay valid.

    Raises:
        ModelError: the adapter is one of other targets, rank or base model.
    """
    state = adapter_parameters(peft_model, adapter_name)
    loaded = load_file(str(Path(folder) / WEIGHTS_FILE))
    loaded.pop(_SAVED_HEAD, None)  # a learner's head is not part of its PEFT model
    shapes = [{key: [*x.shape] for key, x in tensors.items()} for tensors in (state, loaded)]
    for key in sorted(state.keys() | loaded.keys()):
        here, there = (own.get(key, "missing") for own in shapes)
        if here != there:
            raise ModelError(
                f"adapter: {folder} does not fit adapter {adapter_name!r}: the shape of {key} is "
                f"{there} in the folder and {here} in the adapter. Rank, targets and base model "
                "must be those it was trained with."
            )
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(loaded[key])


def read_reward_head(folder: str | Path) -> Tensor:
    """Read a reward model's head, [1, hidden].

    Raises:
        ModelError: the folder has none with one label.
    """
    with safe_open(str(Path(folder) / WEIGHTS_FILE), framework="pt") as file:
        if _SAVED_HEAD in file.keys():  # noqa: SIM118 - not a mapping
            head = file.get_tensor(_SAVED_HEAD)
            if head.shape[0] == 1:
                return head
    raise ModelError(f"reward model: {folder} has no head of one label ({_SAVED_HEAD}).")


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
    with safe_open(str(Path(folder) / WEIGHTS_FILE), framework="pt") as file:
        own_names = set(file.keys())
    if adapter_parameters(peft_model, adapter_name).keys() == own_names:
        load_adapter_weights(peft_model, adapter_name, folder)
        return
    lacks = [name for name in loaded.missing_keys if f".{adapter_name}." in f"{name}."]
    for said, names in (("lacks", lacks), ("has unknown", loaded.unexpected_keys)):
        if names:
            raise ModelError(
                f"adapter: {folder} does not fit this model: it {said} {len(names)} tensors, such "
                f"as {names[0]}."
            )


# ---- how large a model is, without its weights


def model_without_weights(name: str) -> PreTrainedModel | None:
    """Build a model on the meta device; None if only its own code could build it."""
    try:
        config = AutoConfig.from_pretrained(resolve_model(name), trust_remote_code=False)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError):
        return None


def count_parameters(name: str, rank: int) -> int | None:
    """Count the parameters of the base and one adapter of this rank; None if only the model's own
    code could build it."""
    if (base := model_without_weights(name)) is None:
        return None
    try:
        with torch.device("meta"):
            model = get_peft_model(base, lora_config(rank, 32.0, "all-linear"))
    except (ValueError, RuntimeError):
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_in_name(name: str) -> int | None:
    """Read a name: ``Qwen/Qwen3-30B-A3B`` has 30 billion, active or not; None if it has none."""
    found = _BILLIONS.search(name)
    return None if found is None else round(float(found[1]) * 1e9)
