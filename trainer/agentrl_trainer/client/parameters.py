"""Parameters that only Tinker has: by method, and what the local backend does with each.

The clients take them as keywords. Over Tinker they are sent as given. Locally a parameter is
ignored, or refused with the reason below unless its value asks for nothing special.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Local(NamedTuple):
    """What the local backend does with a parameter."""

    refusal: str = ""
    """Why it is refused, and the fix; empty: it is ignored."""
    accepted: Any = None
    """A value that is accepted nevertheless, as are None, False and 0."""


_UNKNOWN = Local("is not known to the local backend; leave it out")
_REFUSED = {
    "train_unembed": Local("the output embedding cannot be trained locally; leave it False"),
    "optimizer": Local("the local backend has AdamW only; leave it out", "adamw"),
    "kind": Local(
        "local sampling clients keep their weights; make a new one after each update", "snapshot"
    ),
    "loss_type_input": Local("must be 'logprobs', which is the default", "logprobs"),
    "topk_prompt_logprobs": _UNKNOWN,
    "target_prompt_logprobs": _UNKNOWN,
    "prompt_alt_tokens_k": _UNKNOWN,
    "prompt_logprobs_last_n": _UNKNOWN,
}
_OF_METHODS = {
    "ServiceClient": "user_metadata project_id display_name api_key default_headers_overrides",
    "create_lora_training_client": "train_unembed user_metadata optimizer",
    "create_training_client_from_state": "user_metadata weights_access_token optimizer",
    "create_training_client_from_state_with_optimizer": "user_metadata weights_access_token",
    "create_sampling_client": "retry_config record_stability_info",
    "save_weights_and_get_sampling_client": "retry_config record_stability_info name kind",
    "save_state": "ttl_seconds user_metadata",
    "save_weights_for_sampler": "ttl_seconds user_metadata",
    "load_state": "weights_access_token",
    "load_state_with_optimizer": "weights_access_token",
    "forward_backward_custom": "loss_type_input",
    "sample": "topk_prompt_logprobs target_prompt_logprobs prompt_alt_tokens_k "
    "prompt_logprobs_last_n",
    "compute_logprobs": "prompt_logprobs_last_n",
}
TINKER_ONLY: dict[str, dict[str, Local]] = {
    method: {name: _REFUSED.get(name, Local()) for name in names.split()}
    for method, names in _OF_METHODS.items()
}
"""By method, by parameter."""


def check_tinker_only(method: str, given: Mapping[str, Any]) -> None:
    """Check the Tinker-only parameters of a call to the local backend.

    Raises:
        TypeError: the method has no such parameter.
        ValueError: a value is refused; names the parameter and the fix.
    """
    known = TINKER_ONLY[method]
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        refusal, accepted = known[name]
        unset = isinstance(value, int | None) and not value
        # An OptimizerConfig of the SDK says in ``type`` which optimizer it is.
        if refusal and not unset and getattr(value, "type", value) != accepted:
            raise ValueError(f"{name}: {refusal}")
