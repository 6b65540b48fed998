"""Decide how a request is sampled: from the rollout, the request and the gateway's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import context_length_exceeded, invalid
from agentrl_proxy.protocols.chat import ChatRequest, sampling_value
from agentrl_proxy.sampler import DecodingParams

_DEFAULT_MAX_TOKENS = 4096  # where neither a setting nor the context length limits the answer
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


def decoding_params(
    deps: GatewayDependencies,
    request: ChatRequest,
    rollout: Mapping[str, Any],
    prompt_tokens: int,
    grammar: str | None,
) -> DecodingParams:
    """Take each value from the first source that sets it: the rollout's ``force``, the request, the
    rollout, the gateway's defaults.

    Args:
        rollout: the rollout's sampling settings.

    Raises:
        ApiError: the prompt leaves no room, or a value is out of range (400).
    """
    context_length, vocab_size = deps.context_length, deps.renderer.vocab_size
    n, tops, biases = request.n, request.top_logprobs, request.logit_bias
    room = None if context_length is None else context_length - prompt_tokens
    if context_length is not None and prompt_tokens >= context_length:
        param = "messages" if request.prompt_ids is None else "prompt"
        raise context_length_exceeded(prompt_tokens, context_length, param)
    values: dict[str, Any] = {}
    for name in _TUNABLE:
        for source in (rollout.get("force") or {}, request.sampling, rollout, deps.defaults):
            value = source.get(name)
            if value is not None:
                checked = source is request.sampling
                values[name] = value if checked else sampling_value(name, value)
                break
    if request.sampling.get("max_tokens") == 0:  # echo alone; ``force`` must not sample
        values["max_tokens"] = 0
    elif room is not None:
        # max_tokens is a limit, so an answer that fits is better than a refusal.
        values["max_tokens"] = min(values.get("max_tokens", room), room)
    values.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
    if any(token_id >= vocab_size for token_id, _ in biases):
        raise invalid("logit_bias", f"logit_bias: token ids go from 0 to {vocab_size - 1}")
    return DecodingParams(n=n, top_logprobs=tops, logit_bias=biases, grammar=grammar, **values)


def recorded_params(params: DecodingParams) -> dict[str, Any]:
    """Return what ``Call.params`` says of the sampling."""
    # Not by ``asdict``: it copies deeply, for every request.
    recorded: dict[str, Any] = {name: getattr(params, name) for name in (*_TUNABLE, "n")}
    recorded["stop"] = list(params.stop)
    if params.logit_bias:
        recorded["logit_bias"] = {str(i): value for i, value in params.logit_bias}
    return recorded
