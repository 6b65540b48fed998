"""Loading the base model, and LoRA adapters in and out of PEFT folders.

Knows: transformers, peft, safetensors. Does not know: sampling, training, HTTP.

An adapter on disk is always a standard PEFT folder (``adapter_config.json`` and
``adapter_model.safetensors``): the same folder serves the embedded sampler, vLLM and the user.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar

from agentrl_trainer.models.moe import (
    TargetError,
    beside_the_weights,
    for_experts,
    is_multimodal,
    no_false_warnings,
)

TINY_MODEL = "agentrl-tiny"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


class ModelError(ValueError):
    """The model or adapter cannot be used; the message says which field to change, and how."""


@dataclass(frozen=True)
class BaseModel:
    """A loaded base model, without adapters."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """The name the user gave, e.g. ``agentrl-tiny`` or ``Qwen/Qwen3-0.6B``."""
    device: torch.device
    dtype: torch.dtype
    context_length: int
    """Most tokens, prompt and answer together, the model has positions for."""
    eos_ids: frozenset[int]
    """Tokens which end an answer: the generation config's and the tokenizer's."""


def resolve_model(name: str) -> str:
    """Where the weights of ``name`` are: a local folder, or the hub name as it is."""
    if name == TINY_MODEL:
        from agentrl_trainer.tiny import MODEL_DIR

        if not (MODEL_DIR / "config.json").is_file():
            raise ModelError(
                f"model: the weights of {TINY_MODEL!r} are missing from {MODEL_DIR}. Reinstall "
                "agentrl, or rebuild them with `python scripts/tiny_model/pretrain.py`."
            )
        return str(MODEL_DIR)
    if not name:
        raise ModelError(
            f"model: is empty. Give {TINY_MODEL!r}, a local folder or a Hugging Face name."
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model: {name!r} is a folder without a config.json. Give a folder written by "
                "`save_pretrained`, or a Hugging Face name."
            )
        return str(folder)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local:
        raise ModelError(
            f"model: there is no folder {name!r} (looked in {Path.cwd()}). Give {TINY_MODEL!r}, an "
            "existing folder, or a Hugging Face name such as 'Qwen/Qwen3-0.6B'."
        )
    return name


@dataclass(frozen=True)
class ModelFacts:
    """What there is to know of a base model without its weights; the fields are BaseModel's."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    eos_ids: frozenset[int]


def load_facts(name: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Reads what a process needs that lets another one sample: no weights.

    Raises:
        ModelError: as ``load_base`` does.
    """
    source = resolve_model(name)
    config, tokenizer, _ = _load_config(name, source, trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # the model has no such file; transformers derives it from the configuration
        generation = GenerationConfig.from_model_config(config)
    eos_ids = _eos_ids(generation, tokenizer)
    return ModelFacts(tokenizer, _context_length(config, tokenizer), eos_ids)


def load_base(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
) -> BaseModel:
    """Load a decoder-only chat model in evaluation mode, its weights frozen.

    A model that takes images or sound as well is loaded whole, and used for text: adapters are of
    its language model, under the names which they have in the whole.

    ``device`` "auto": the first GPU, else the CPU. ``dtype`` "auto": the checkpoint's own type on a
    GPU, float32 on a CPU (where half precision is slower and less exact). ``load_in_4bit``: linear
    layers in NF4 (QLoRA, arXiv:2305.14314), by bitsandbytes, computing in ``dtype``.
    ``trust_remote_code``: run the code that comes with the model, if transformers has none for it,
    and the code that comes with its tokenizer.
    """
    source = resolve_model(name)
    config, tokenizer, load = _load_config(name, source, trust_remote_code)
    target = _device(device)
    kind = _dtype(dtype, target)
    disable_progress_bar()  # ours is the display that people look at
    if load_in_4bit:
        options = {"quantization_config": _four_bit(kind), "device_map": {"": target}}
        try:
            model = _load(name, lambda: load(dtype=kind, **options))
        except (ImportError, RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"load_in_4bit: bitsandbytes cannot do this on {target}: {error}. Choose another "
                "device, or leave load_in_4bit out."
            ) from error
    else:
        model = _load(name, lambda: load(dtype=kind))
        model = model.to(target)
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


def checkpoint_dtype(name: str, *, trust_remote_code: bool = False) -> torch.dtype:
    """The type that a model's weights are stored in."""
    source = resolve_model(name)
    config, _, load = _load_config(name, source, trust_remote_code)
    for known in (config, config.get_text_config()):
        if isinstance(found := getattr(known, "dtype", None), torch.dtype):
            return found
    # An older checkpoint that does not say: its weights do.
    return _load(name, lambda: load(dtype="auto")).dtype


def evaluation_mode(model: Any) -> Any:
    """``model.eval()``, but such that gradients may still pass through 4-bit layers.

    In evaluation mode on a CPU, bitsandbytes 0.50 packs their weights for a kernel that has no
    backward; torch then only warns that the gradient may be wrong. They hold no dropout.
    """
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True
    return model


def lora_config(rank: int, alpha: float, targets: str | list[str] = "all-linear") -> LoraConfig:
    """LoRA (arXiv:2106.09685) without dropout; "all-linear" is every linear layer but the output
    embedding.

    In a mixture of experts that includes the experts and leaves out routers: see ``experts``.
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

    The global random state is left as it was, and trainable weights are float32 whatever the base.
    """
    if "." in name or not name:
        raise ModelError(f"adapter: {name!r} is no usable name; it may not be empty or hold dots.")
    config = copy.deepcopy(config)  # PEFT resolves the targets in place: one config, many adapters
    try:
        # get_base_model() asks for the active adapter, and the last one may have been deleted.
        plain = base.base_model.model if isinstance(base, PeftModel) else base.model
        config = for_experts(config, plain)
    except TargetError as error:
        raise ModelError(str(error)) from error
    with (
        torch.random.fork_rng(devices=_cuda_devices()),
        warnings.catch_warnings(),
        no_false_warnings(),
    ):
        # PEFT dislikes names such as "a", parts of its own "lora_"; our reading does not mind.
        warnings.filterwarnings("ignore", message="Adapter name '.*' should not be contained")
        # It also asks transformers for an attribute that was renamed there.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(seed)
        if isinstance(base, PeftModel):
            if name in base.peft_config:
                raise ModelError(f"adapter: {name!r} is already attached to this model.")
            # As PEFT itself does for the first one: our own name of the model.
            config.base_model_name_or_path = cast(Any, base).base_model.model.name_or_path
            try:
                base.add_adapter(name, config)
            except ValueError as error:
                raise ModelError(f"adapter: {name!r} cannot join the others: {error}") from error
            beside_the_weights(base)
            return base
        # PEFT writes this into adapter_config.json, and would write a path for a local folder.
        base.model.__dict__["name_or_path"] = base.name
        attached = cast(PeftModel, get_peft_model(base.model, config, adapter_name=name))
        beside_the_weights(attached)
        return attached


def save_adapter(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Write a PEFT folder; readers see either nothing or the whole of it.

    Written beside ``folder`` under a temporary name, synced, then renamed. A folder which is
    already there is replaced (versions normally get a new folder each, so this is a resume).
    """
    folder = Path(folder)
    _require_adapter(peft_model, adapter_name)
    state = get_peft_model_state_dict(
        peft_model, adapter_name=adapter_name, save_embedding_layers=False
    )
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    config = peft_model.peft_config[adapter_name].to_dict()
    config["inference_mode"] = True
    # Sets have no order (nor a JSON form): sorted, so that equal adapters give equal files.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    staging.mkdir()
    try:
        save_file(tensors, str(staging / WEIGHTS_FILE), metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))
        for part in (staging / WEIGHTS_FILE, staging / CONFIG_FILE, staging):
            _fsync(part)
        if folder.exists():
            # rename() cannot replace a folder that has content: move the old one out of the way.
            old = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.old"
            os.rename(folder, old)
            os.rename(staging, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(staging, folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def load_adapter_weights(peft_model: PeftModel, adapter_name: str, folder: str | Path) -> None:
    """Copy a saved adapter into the attached one, in place: optimizer references stay valid."""
    _require_adapter(peft_model, adapter_name)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"adapter: {path} does not exist; is {folder} a PEFT adapter folder?")
    loaded = load_file(str(path))
    state = get_peft_model_state_dict(
        peft_model, adapter_name=adapter_name, save_embedding_layers=False
    )
    if missing := sorted(state.keys() - loaded.keys()):
        raise ModelError(_mismatch(folder, adapter_name, "lacks", missing))
    if unexpected := sorted(loaded.keys() - state.keys()):
        raise ModelError(_mismatch(folder, adapter_name, "has unknown", unexpected))
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
    """A saved adapter's weights into the attached one, whether it was saved here or by PEFT.

    PEFT reads every file as if its names were a checkpoint's, and loses weights where transformers
    renames ``x`` into ``xs`` (Laguna's shared experts): it then looks for ``xss``. So where the
    file's names are the model's own, as those of our adapters are, they are taken as they stand.

    Raises:
        ModelError: they do not fit, or not all of them are there; some may have been read.
    """
    try:
        loaded: Any = peft_model.load_adapter(str(folder), adapter_name=adapter_name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"adapter: {folder} does not fit this model: {error}") from error
    state = get_peft_model_state_dict(
        peft_model, adapter_name=adapter_name, save_embedding_layers=False
    )
    if state.keys() == adapter_shapes(folder).keys():
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
    """Tensor names and shapes of a saved adapter, read from the header only."""
    with safe_open(str(Path(folder) / WEIGHTS_FILE), framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _load_config(
    name: str, source: str, trust: bool
) -> tuple[Any, PreTrainedTokenizerBase, Callable[..., PreTrainedModel]]:
    """Configuration, tokenizer, and what loads the weights when given a dtype."""
    own = _runs_code(name, source, trust)
    config = _load(name, lambda: AutoConfig.from_pretrained(source, trust_remote_code=own))
    kind = _require_decoder_only(name, config, own)
    # A tokenizer may have code of its own where the model has none (Moonlight's, Kimi K2's).
    tokenizer = _load(
        name,
        lambda: AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=trust),
    )
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"model: {name!r} has no chat template, so chat requests cannot be rendered. Use the "
            "instruct version of the model, or set `tokenizer.chat_template` and save it."
        )
    return config, tokenizer, partial(kind.from_pretrained, source, trust_remote_code=own)


def _load(name: str, load: Any) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model: could not load {name!r}: {error}\nGive {TINY_MODEL!r} (ships with agentrl), a "
            "local folder, or the name of a model on Hugging Face; private models need "
            "`hf auth login`."
        ) from error


def _runs_code(name: str, source: str, trust: bool) -> bool:
    """Whether to run code that comes with the model: if it must be, and may.

    Before anything else is read: transformers would ask on the terminal.
    """
    raw, _ = _load(name, lambda: PreTrainedConfig.get_config_dict(source))
    kind = raw.get("model_type")
    if "auto_map" not in raw or kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False  # where transformers has the model itself, it uses its own code
    if kind in CONFIG_MAPPING:
        return False  # known; if it is no language model, that is said below
    if trust:
        return True
    raise ModelError(
        f"model: {name!r} ({kind}) comes with code of its own (auto_map in its config.json), which "
        "could do anything to this machine. If you trust its authors, set trust_remote_code to "
        f"true. Or choose a model that transformers {transformers.__version__} has itself, for "
        "instance a Qwen3 or Llama instruct model, or a conversion of this one (often named -hf)."
    )


def _require_decoder_only(name: str, config: Any, trusted: bool) -> Any:
    """The class that loads the model's weights."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model: {name!r} is an encoder-decoder ({config.model_type}); agentrl trains "
            "decoder-only chat models. Choose for instance a Qwen3 or Llama instruct model."
        )
    if is_multimodal(config) and config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return AutoModelForMultimodalLM
    named = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (trusted and named):
        return AutoModelForCausalLM
    raise ModelError(
        f"model: {name!r} ({config.model_type}) is not a causal language model. Choose for "
        "instance a Qwen3 or Llama instruct model."
    )


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
_ENDLESS = 2**17
"""Context of models whose configuration and tokenizer tell no length: state spaces have none."""


def _context_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    text = config.get_text_config()
    told = [getattr(text, name, None) for name in (*_LENGTHS, "max_sequence_length")]
    found = next((n for n in told if isinstance(n, int) and n > 1), None)
    if found is None:
        found = min(int(tokenizer.model_max_length), _ENDLESS)
    # Beyond its original length the frequencies of such an embedding follow the longest row of a
    # batch, so what a token's log-prob is would depend on its neighbours.
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        original = parameters.get("original_max_position_embeddings")
        original = original or getattr(text, "original_max_position_embeddings", None)
        found = min(found, original or found)
    return found


def _eos_ids(generation: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found = getattr(generation, "eos_token_id", None)
    ids = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
    own = tokenizer.eos_token_id
    if isinstance(own, int):
        ids.append(own)
    return frozenset(int(i) for i in ids)


def _device(device: str) -> torch.device:
    if device != "auto":
        try:
            found = torch.device(device)
        except RuntimeError as error:
            raise ModelError(f"device: {device!r} is no torch device: {error}") from error
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise ModelError(
                f"device: {device!r} is not there: torch {torch.__version__} sees "
                f"{torch.cuda.device_count()} GPUs. Use auto or cpu, or install torch with CUDA."
            )
        return found
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype: {dtype!r} is unknown; use auto, float32, bfloat16 or float16.")
    return found


def _four_bit(dtype: torch.dtype | str) -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            "load_in_4bit: needs bitsandbytes, which is not installed: `pip install bitsandbytes`, "
            "or leave load_in_4bit out."
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("load_in_4bit: needs accelerate: `pip install accelerate`.")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def _require_adapter(peft_model: PeftModel, name: str) -> None:
    if name not in peft_model.peft_config:
        known = ", ".join(sorted(peft_model.peft_config)) or "none"
        raise ModelError(f"adapter: {name!r} is not attached to this model (attached: {known}).")


def _mismatch(folder: str | Path, name: str, what: str, keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return (
        f"adapter: {folder} {what} tensors {shown}, compared with adapter {name!r}. Targets and "
        "base model must be those it was trained with."
    )


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
