"""Which options of verl a user may give. Imports no verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def check_options(engine: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse what verl would do otherwise than agentrl trains.

    Args:
        engine, model: of verl's ``FSDPEngineConfig`` and ``HFModelConfig``.

    Raises:
        ValueError: names the option and the fix.
    """
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
    if engine.get("ulysses_sequence_parallel_size", 1) > 1 and how not in _FLASH:
        raise ValueError(
            "verl.engine.ulysses_sequence_parallel_size: verl exchanges the parts of a row in "
            f"flash attention only, not in {how!r}; set verl.model.override_config to "
            '{attn_implementation = "flash_attention_2"}'
        )
