"""An adapter merged into the weights of its base model. Imports torch, so ``export`` asks late."""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.hub import cached_file

from agentrl.export import ollama
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.checkpoint import atomic_folder
from agentrl_trainer.models.loading import (
    BaseModel,
    checkpoint_dtype,
    is_multimodal,
    load_base,
)
from agentrl_trainer.models.lora import read_adapter
from agentrl_trainer.models.lora_targets import no_false_warnings
from agentrl_trainer.models.saved_lora import is_reward_model
from agentrl_trainer.models.sources import ModelError, resolve_model

_PROCESSORS = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"


def merge(
    peft: Path, model: str, out: Path, *, trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> None:  # fmt: skip
    """W + (alpha / rank) B A for every adapted layer; tokenizer and chat template beside it.

    A reward model becomes one for sequence classification, whose only label is the score.

    Added up in float32 and rounded once, to the type that the base's checkpoint is in; but for what
    the model keeps in float32.

    Args:
        trust_remote_code, chat_template: as for ``load_base``.

    Raises:
        ModelError: the adapter does not fit the model, or the sum cannot be written down as weights
            of this model, for layers with a weight in common have each an update of its own.
    """
    how: Any = {"trust_remote_code": trust_remote_code, "chat_template": chat_template}
    base = load_base(model, device="cpu", dtype="float32", **how)
    if is_reward_model(peft):
        base.tokenizer.pad_token_id = padding_of(base.tokenizer)
        base = replace(base, model=_as_classifier(base, trust_remote_code))
    with no_false_warnings(), warnings.catch_warnings():
        # PEFT's word on weights it has not found; read_adapter looks for itself.
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(base.model, str(peft))
        read_adapter(adapted, "default", peft)
    _untie(base.model)
    _refuse_shared(base.model, model)
    whole = adapted.merge_and_unload(safe_merge=True)  # pyright: ignore[reportCallIssue]
    _round(whole, checkpoint_dtype(model, **how))
    with atomic_folder(out) as staging:
        whole.save_pretrained(staging)
        base.tokenizer.save_pretrained(staging)
        if not is_reward_model(peft):
            ollama.write_modelfile(staging, base.tokenizer)
        if is_multimodal(base.model.config):
            _copy_processors(model, staging)
        for file in staging.iterdir():  # safetensors keeps weights from other users
            shutil.copymode(staging / "config.json", file)


def _copy_processors(model: str, out: Path) -> None:
    """Copy what reads images and sound, unchanged: without it no other server loads the model."""
    for name in _PROCESSORS:
        with contextlib.suppress(OSError):  # it has none of this name
            found = cached_file(resolve_model(model), name)
            shutil.copyfile(str(found), out / name)


def _as_classifier(base: BaseModel, trust_remote_code: bool) -> PreTrainedModel:
    """Load the base as transformers' model for sequence classification with one label.

    Raises:
        ModelError: transformers has no such model of this family.
    """
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            resolve_model(base.name),
            num_labels=1,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
        )
    except ValueError as error:
        raise ModelError(
            f"merged: transformers has no model for sequence classification of {base.name!r}; "
            "export the adapter by itself, without --merged."
        ) from error
    model.config.get_text_config().pad_token_id = base.tokenizer.pad_token_id
    return model.eval().requires_grad_(False)


def padding_of(tokenizer: Any) -> int:
    """Return a token for padding that ends no turn, unlike that of many models: transformers'
    classifiers take the last token that is not padding as a row's end, and score there."""
    renderer = Renderer(tokenizer)
    own = tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id
    ids = [one for one in (*own, *tokenizer.added_tokens_decoder) if one is not None]
    return next((one for one in ids if not renderer.is_stop(one)), tokenizer.eos_token_id)


def _untie(model: Any) -> None:
    """A tied output embedding gets weights of its own, if one of the two embeddings is adapted:
    what is added to the one shall not be added to the other."""
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    adapted = isinstance(head, BaseTunerLayer) or isinstance(inputs, BaseTunerLayer)
    if adapted and head is not None and head.weight is inputs.weight:
        layer = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        layer.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _refuse_shared(model: torch.nn.Module, name: str) -> None:
    """Refuse an adapted weight that is in use elsewhere (Zamba's blocks): both would be updated.

    transformers would tie copies of such weights again when it loads them.
    """
    uses: dict[torch.Tensor, list[str]] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        uses.setdefault(weight, []).append(path.rpartition(".")[0].replace(".base_layer", ""))
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for weight in module.get_base_layer().parameters(recurse=False):
                if len(users := uses[weight]) > 1:
                    raise ModelError(
                        f"merged: {name!r} cannot be merged: {users[0]} and {users[1]} share one "
                        "weight, and the update of one would be the other's as well. Export the "
                        "adapter by itself, without --merged."
                    )


def _round(model: Any, dtype: torch.dtype) -> None:
    """``model.to(dtype)``, less what transformers loads in float32 whatever is asked for."""
    kept = [re.compile(part.replace("*", ".*")) for part in model._get_dtype_plan(dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part.search(name) for part in kept):
            tensor.data = tensor.data.to(dtype)
