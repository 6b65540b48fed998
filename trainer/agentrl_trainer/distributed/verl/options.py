"""Which options of verl a user may give. Imports no verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ULYSSES = "ulysses_sequence_parallel_size"
"""verl's option: how many workers share each row (arXiv:2309.14509)."""
_OF_BATCH = "follows from learning.micro_batch_tokens"
_OF_ADAPTER = "is the adapter's"
_TAKEN = {
    "verl.engine": {
        "use_dynamic_bsz": _OF_BATCH,
        "max_token_len_per_gpu": _OF_BATCH,
        "infer_max_token_len_per_gpu": _OF_BATCH,
        "micro_batch_size_per_gpu": _OF_BATCH,
        "infer_micro_batch_size_per_gpu": _OF_BATCH,
        "forward_only": "is false in a training",
        "use_remove_padding": "is verl.model.use_remove_padding",
        "use_fused_kernels": "is verl.model.use_fused_kernels",
    },
    "verl.model": {
        "path": "is model.name",
        "trust_remote_code": "is model.trust_remote_code",
        "enable_gradient_checkpointing": "is learning.gradient_checkpointing",
        "lora_rank": _OF_ADAPTER,
        "lora_alpha": _OF_ADAPTER,
        "lora_adapter_path": _OF_ADAPTER,
        "target_modules": _OF_ADAPTER,
        "target_parameters": _OF_ADAPTER,
        "exclude_modules": _OF_ADAPTER,
    },
}
"""Options that follow from agentrl's settings, and which."""
_FLASH = ("flash_attention_2", "flash_attention_3")


def check_options(
    workers: int, nodes: int, dtype: str, engine: Mapping[str, Any], model: Mapping[str, Any]
) -> None:
    """Refuse options that agentrl sets itself, or with which gradients would be wrong.

    Args:
        dtype: of the base model, as ``load_base`` takes it.
        engine, model: of verl's ``FSDPEngineConfig`` and ``HFModelConfig``.

    Raises:
        ValueError: names the option and the fix.
    """
    if workers % nodes:
        raise ValueError(f"verl.nodes: {workers} learning.trainers do not fill {nodes} alike")
    if dtype == "float16":
        raise ValueError("model.dtype: verl trains in bfloat16 or float32; choose one of them")
    for table, given in (("verl.engine", engine), ("verl.model", model)):
        for name in given:
            if why := _TAKEN[table].get(name):
                raise ValueError(f"{table}.{name}: {why}; leave it out")
    if (strategy := engine.get("strategy", "fsdp2")) != "fsdp2":
        raise ValueError(
            f"verl.engine.strategy: {strategy!r} keeps gradients in buffers of its own, where "
            "those of the adapter are not found; use fsdp2"
        )
    how = model.get("override_config", {}).get("attn_implementation", "sdpa")
    parts = engine.get(ULYSSES, 1)
    if workers % parts:
        raise ValueError(
            f"verl.engine.{ULYSSES}: rows in {parts} parts need a multiple of {parts} "
            f"learning.trainers, not {workers}"
        )
    if parts > 1 and how not in _FLASH:
        raise ValueError(
            f"verl.engine.{ULYSSES}: verl exchanges the parts of a row in "
            f"flash attention only, not in {how!r}; set verl.model.override_config to "
            '{attn_implementation = "flash_attention_2"}'
        )
