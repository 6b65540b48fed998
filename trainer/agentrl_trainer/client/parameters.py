"""Parameters that only Tinker has: by method, and what the local backend does with each.

The clients take them as keywords. Over Tinker they are sent as given. Locally a parameter of
``REFUSED`` is refused unless its value asks for nothing special; the others are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAMPLING = "retry_config record_stability_info"
_PROMPT_LOGPROBS = "topk_prompt_logprobs target_prompt_logprobs prompt_alt_tokens_k"
TINKER_ONLY: dict[str, list[str]] = {
    method: names.split()
    for method, names in {
        "ServiceClient": "user_metadata project_id display_name api_key default_headers_overrides",
        "create_lora_training_client": "train_unembed user_metadata optimizer",
        "create_training_client_from_state": "user_metadata weights_access_token optimizer",
        "create_training_client_from_state_with_optimizer": "user_metadata weights_access_token",
        "create_sampling_client": _SAMPLING,
        "save_weights_and_get_sampling_client": f"{_SAMPLING} name kind",
        "save_state": "ttl_seconds user_metadata",
        "save_weights_for_sampler": "ttl_seconds user_metadata",
        "load_state": "weights_access_token",
        "load_state_with_optimizer": "weights_access_token",
        "forward_backward_custom": "loss_type_input",
        "sample": f"{_PROMPT_LOGPROBS} prompt_logprobs_last_n",
        "compute_logprobs": "prompt_logprobs_last_n",
    }.items()
}
"""Names of parameters, by method."""

_UNKNOWN = ("is not known to the local backend; leave it out", None)
REFUSED: dict[str, tuple[str, Any]] = {
    "train_unembed": ("the output embedding cannot be trained locally; leave it False", None),
    "optimizer": ("the local backend has AdamW only; leave it out", "adamw"),
    "kind": (
        "local sampling clients keep their weights; make a new one after each update", "snapshot",
    ),
    "loss_type_input": ("must be 'logprobs', which is the default", "logprobs"),
    **dict.fromkeys([*_PROMPT_LOGPROBS.split(), "prompt_logprobs_last_n"], _UNKNOWN),
}  # fmt: skip
"""By parameter: why it is refused, with the fix, and the value that is accepted nevertheless, as
are None, False and 0."""


def check_tinker_only(method: str, given: Mapping[str, Any]) -> None:
    """Check the Tinker-only parameters of a call to the local backend.

    Raises:
        TypeError: the method has no such parameter.
        ValueError: a value is refused; names the parameter and the fix.
    """
    for name, value in given.items():
        if name not in TINKER_ONLY[method]:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        refusal, accepted = REFUSED.get(name, ("", None))
        unset = isinstance(value, int | None) and not value
        # An OptimizerConfig of the SDK says in ``type`` which optimizer it is.
        if refusal and not unset and getattr(value, "type", value) != accepted:
            raise ValueError(f"{name}: {refusal}")
