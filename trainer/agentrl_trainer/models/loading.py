"""Load a base model, or what a process without its weights needs of it.

Knows transformers, not adapters, sampling or training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar

from agentrl_trainer.models.devices import choose_device
from agentrl_trainer.models.sources import ModelError, resolve_model
from agentrl_trainer.names import BUILT_IN

CHAT_TEMPLATES = {
    "role_colon": (
        "{%- for message in messages -%}"
        "{{ message.role | capitalize + ': ' + message.content | trim }}"
        "{{ eos_token if message.role == 'assistant' }}{{ '\n\n' }}"
        "{%- endfor -%}"
        "{{ 'Assistant:' if add_generation_prompt }}"
    ),
}
"""For base models. ``role_colon`` writes ``User: ...``, ``Assistant: ...`` as tinker-cookbook's
renderer of that name does, and has no place for tools."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a base model without its weights."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    """The most tokens, prompt and answer together."""
    eos_ids: frozenset[int]
    """Tokens that end an answer: the generation config's and the tokenizer's."""


@dataclass(frozen=True)
class BaseModel(ModelFacts):
    """A loaded base model, without adapters."""

    model: PreTrainedModel
    name: str
    """The name the user gave, e.g. ``agentrl-tiny`` or ``Qwen/Qwen3-0.6B``."""
    device: torch.device
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        """How many there are, those of adapters included; two in each byte of 4-bit weights."""
        return sum(
            p.numel() * (2 if type(p).__name__ == "Params4bit" else 1)
            for p in self.model.parameters()
        )


def is_multimodal(config: Any) -> bool:
    """Tell whether a model has other inputs than text, for which it has towers."""
    towers = any(getattr(config, f"{sense}_config", None) for sense in ("vision", "audio"))
    return towers or config.get_text_config() is not config


def load_facts(
    name: str, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> ModelFacts:
    """Load what a process needs that lets another one sample: no weights.

    Args:
        trust_remote_code, chat_template: as for ``load_base``.

    Raises:
        ModelError: as ``load_base`` does.
    """
    config, tokenizer, _ = _load_config(name, trust_remote_code, chat_template)
    try:
        generation = GenerationConfig.from_pretrained(resolve_model(name))
    except OSError:  # the model has no such file; transformers derives it from the configuration
        generation = GenerationConfig.from_model_config(config)
    length = _context_length(config, tokenizer)
    return ModelFacts(tokenizer, length, _eos_ids(generation, tokenizer))


def load_base(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    distributed: Mapping[str, Any] | None = None,
) -> BaseModel:
    """Load a decoder-only chat model in evaluation mode, its weights frozen.

    A model that takes images or sound as well is loaded whole, and used for text: adapters are of
    its language model, under their names in the whole model.

    Args:
        device: "auto": the first CUDA GPU, else a Mac's GPU (MPS), else the CPU.
        dtype: "auto": the checkpoint's own type on a GPU, float32 on a CPU (where half precision is
            slower and less exact).
        load_in_4bit: linear layers in NF4 (QLoRA, arXiv:2305.14314), by bitsandbytes, computing in
            ``dtype``.
        trust_remote_code: run the code that comes with the model, if transformers has none for it,
            and the code that comes with its tokenizer.
        chat_template: one of ``CHAT_TEMPLATES`` in place of the tokenizer's own, for base
            models, which have none.
        distributed: sizes of transformers' ``DistributedConfig``: each rank of the process group
            loads its part of every weight.

    Raises:
        ModelError: the model cannot be loaded or used.
    """
    config, tokenizer, load = _load_config(name, trust_remote_code, chat_template)
    target = choose_device(device)
    kind: Any = torch.float32 if target.type == "cpu" else "auto"
    if dtype != "auto" and not isinstance(kind := getattr(torch, dtype, None), torch.dtype):
        raise ModelError(f"dtype: {dtype!r} is unknown; use auto, float32, bfloat16 or float16.")
    disable_progress_bar()
    if load_in_4bit:
        try:
            quantized = partial(
                BitsAndBytesConfig,
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16 if kind == "auto" else kind,
            )
            how = {"quantization_config": _load(name, quantized), "device_map": {"": target}}
            model = _load(name, load, dtype=kind, **how)
        except RuntimeError as error:
            raise ModelError(
                f"load_in_4bit: bitsandbytes cannot do this on {target}: {error}. Choose another "
                "device, or leave load_in_4bit out."
            ) from error
    elif distributed is not None:
        there = torch.accelerator.current_accelerator() or torch.device("cpu")
        if there.type != target.type:  # transformers would take what is there
            raise ModelError(f"device: a base that is spread needs {there.type}, not {target.type}")
        from transformers.distributed.configuration_utils import DistributedConfig

        how = DistributedConfig(**distributed)
        model = _load(name, load, dtype=kind, distributed_config=how)
        model._tp_size = None  # it is 1; PEFT would gather the whole base to save an adapter
    else:
        model = _load(name, load, dtype=kind).to(target)
    model = cast(PreTrainedModel, evaluation_mode(model).requires_grad_(False))
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        device=target,
        dtype=model.dtype,
        context_length=_context_length(config, tokenizer),
        eos_ids=_eos_ids(getattr(model, "generation_config", None), tokenizer),
    )


def checkpoint_dtype(
    name: str, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> torch.dtype:
    """Return the type that a model's weights are stored in; the arguments are ``load_base``'s."""
    config, _, load = _load_config(name, trust_remote_code, chat_template)
    for known in (config, config.get_text_config()):
        if isinstance(found := getattr(known, "dtype", None), torch.dtype):
            return found
    # Configurations of older checkpoints have no dtype; their weights do.
    return _load(name, load, dtype="auto").dtype


def evaluation_mode(model: Any) -> Any:
    """Set evaluation mode, but let gradients pass through 4-bit layers.

    In evaluation mode on a CPU, bitsandbytes 0.50 packs their weights for a kernel that has no
    backward; torch then only warns that the gradient may be wrong. They hold no dropout.
    """
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of layers, and compute them again in the backward.

    Layers do so in training mode; their submodules (dropout) stay in evaluation mode.
    """
    # transformers 5.20 renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


@contextlib.contextmanager
def layers_recomputed(model: Any, wanted: bool) -> Iterator[None]:
    """Compute layers again in backwards meanwhile, if that is wanted and the model can do it."""
    base = model.get_base_model()
    if not (wanted and base.supports_gradient_checkpointing):
        yield
        return
    checkpoint_layers(base)
    try:
        yield
    finally:
        evaluation_mode(model)


def _load_config(
    name: str, trust: bool, chat_template: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase, Callable[..., PreTrainedModel]]:
    """Return configuration, tokenizer, and what loads the weights when given a dtype."""
    source = resolve_model(name)
    # Read first, because transformers would ask on the terminal whether to run a model's own code.
    raw, _ = _load(name, PreTrainedConfig.get_config_dict, source)
    kind = raw.get("model_type")
    # Where transformers has the model itself, it uses its own code.
    foreign = bool(raw.get("auto_map")) and kind not in CONFIG_MAPPING
    if foreign and not trust:
        raise ModelError(
            f"model: {name!r} ({kind}) comes with code of its own (auto_map in its config.json), "
            "which could do anything to this machine. If you trust its authors, set "
            "trust_remote_code to true. Or choose a model that transformers "
            f"{transformers.__version__} has itself, or a conversion of this one (often named -hf)."
        )
    config = _load(name, AutoConfig.from_pretrained, source, trust_remote_code=foreign)
    loader = _loader(name, config, foreign)
    # A tokenizer may have code of its own where the model has none (Moonlight's, Kimi K2's).
    tokenizer = _load(
        name, AutoTokenizer.from_pretrained, source, config=config, trust_remote_code=trust
    )
    if chat_template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[chat_template]
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"model: {name!r} has no chat template, so chat requests cannot be rendered. Use the "
            "instruct version of the model, or set model.chat_template to role_colon, or "
            "`tokenizer.chat_template` and save it."
        )
    return config, tokenizer, partial(loader.from_pretrained, source, trust_remote_code=foreign)


def _load(name: str, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return load(*args, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model: could not load {name!r}: {error}\nGive a built-in name "
            f"({', '.join(BUILT_IN)}), a local folder, or the name of a model on Hugging Face; "
            "private models need `hf auth login`."
        ) from error


def _loader(name: str, config: Any, foreign: bool) -> Any:
    """Choose the class that loads the weights; refuse all but decoder-only models."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        fault = f"is an encoder-decoder ({kind}); agentrl trains decoder-only chat models"
    elif is_multimodal(config) and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return AutoModelForMultimodalLM
    elif kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        foreign and "AutoModelForCausalLM" in config.auto_map
    ):
        return AutoModelForCausalLM
    else:
        fault = f"({kind}) is not a causal language model"
    raise ModelError(
        f"model: {name!r} {fault}. Choose for instance a Qwen3 or Llama instruct model."
    )


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length",
            "max_sequence_length")  # fmt: skip
_ENDLESS = 2**17
"""Context of models whose configuration and tokenizer have no length: state spaces."""


def _context_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    text = config.get_text_config()
    told = [getattr(text, name, None) for name in _LENGTHS]
    found = next((n for n in told if isinstance(n, int) and n > 1), None)
    if found is None:
        found = min(int(tokenizer.model_max_length), _ENDLESS)
    # Beyond its original length the frequencies of such an embedding follow the longest row of a
    # batch, so a token's log-prob would depend on other rows.
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        name = "original_max_position_embeddings"
        found = min(found, parameters.get(name) or getattr(text, name, None) or found)
    return found


def _eos_ids(generation: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found = getattr(generation, "eos_token_id", None)
    ids = found if isinstance(found, (list, tuple)) else [found]
    every = (*ids, tokenizer.eos_token_id, _turn_end(tokenizer))
    return frozenset(int(i) for i in every if isinstance(i, int))


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes behind an answer, if it is one.

    Base models often have the template of their instruct version, and another end of text.
    """
    answer = "DUMMYREPLY"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template may raise anything
        return None
    _, found, ending = text.rpartition(answer)
    first = next(iter(tokenizer.encode(ending, add_special_tokens=False)), None) if found else None
    known = None if first is None else tokenizer.added_tokens_decoder.get(first)
    return first if known is not None and known.special else None
