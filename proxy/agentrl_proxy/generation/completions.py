"""Split a legacy ``/v1/completions`` request into one TextPrompt for each prompt."""

from __future__ import annotations

from agentrl_proxy.generation.decoding import answer_room
from agentrl_proxy.generation.response import TextPrompt
from agentrl_proxy.protocols.completions import CompletionRequest


def text_prompts(request: CompletionRequest, context_length: int | None) -> list[TextPrompt]:
    """
    Raises:
        ApiError: a prompt does not fit into the context (400).
    """
    common = request.common
    for ids in request.prompts:
        answer_room(len(ids), context_length, "prompt")
    return [
        TextPrompt(common, ids, i * common.n, request.scored)
        for i, ids in enumerate(request.prompts)
    ]
