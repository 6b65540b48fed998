"""Parameters that only Tinker has: by method, what the local backend does with each.

The clients take them as keywords. Over Tinker they are sent as given. Locally a parameter is
ignored, or refused with the reason below unless its value asks for nothing special.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Local(NamedTuple):
    """What the local backend does with a parameter."""

    refusal: str = ""
    """Why it is refused, and the fix; empty: it is ignored."""
    accepted: Any = None
    """A value that is accepted nevertheless, as are None, False and 0."""


_IGNORED = Local()
_ADAMW = Local("the local backend has AdamW only; leave it out", "adamw")
_SAMPLER = {"retry_config": _IGNORED, "record_stability_info": _IGNORED}
_UNKNOWN = Local("is not known to the local backend; leave it out")

TINKER_ONLY: dict[str, dict[str, Local]] = {
    "ServiceClient": dict.fromkeys(
        ("user_metadata", "project_id", "display_name", "api_key", "default_headers_overrides"),
        _IGNORED,
    ),
    "create_lora_training_client": {
        "train_unembed": Local("the output embedding cannot be trained locally; leave it False"),
        "user_metadata": _IGNORED,
        "optimizer": _ADAMW,
    },
    "create_training_client_from_state": {
        "user_metadata": _IGNORED,
        "weights_access_token": _IGNORED,
        "optimizer": _ADAMW,
    },
    "create_training_client_from_state_with_optimizer": {
        "user_metadata": _IGNORED,
        "weights_access_token": _IGNORED,
    },
    "create_sampling_client": _SAMPLER,
    "save_weights_and_get_sampling_client": {
        **_SAMPLER,
        "name": _IGNORED,
        "kind": Local(
            "local sampling clients keep their weights; make a new one after each update",
            "snapshot",
        ),
    },
    "save_state": {"ttl_seconds": _IGNORED, "user_metadata": _IGNORED},
    "save_weights_for_sampler": {"ttl_seconds": _IGNORED, "user_metadata": _IGNORED},
    "load_state": {"weights_access_token": _IGNORED},
    "load_state_with_optimizer": {"weights_access_token": _IGNORED},
    "forward_backward_custom": {
        "loss_type_input": Local("must be 'logprobs', which is the default", "logprobs")
    },
    "sample": {
        "topk_prompt_logprobs": _UNKNOWN,
        "target_prompt_logprobs": _UNKNOWN,
        "prompt_alt_tokens_k": _UNKNOWN,
        "prompt_logprobs_last_n": _UNKNOWN,
    },
    "compute_logprobs": {"prompt_logprobs_last_n": _UNKNOWN},
}
"""By method, by parameter."""


class Backend(Protocol):
    is_local: bool


def tinker_options(method: str, given: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Check the Tinker-only parameters of a call; return those to send to Tinker.

    Raises:
        TypeError: the method has no such parameter.
        ValueError: the local backend refuses a value; names the parameter and the fix.
    """
    known = TINKER_ONLY[method]
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        refusal, accepted = known[name]
        unset = isinstance(value, int | None) and not value
        # An OptimizerConfig of the SDK says in ``type`` which optimizer it is.
        special = not unset and getattr(value, "type", value) != accepted
        if backend.is_local and refusal and special:
            raise ValueError(f"{name}: {refusal}")
    return {name: value for name, value in given.items() if value is not None}
