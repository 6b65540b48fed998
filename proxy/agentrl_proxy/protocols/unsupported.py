"""Refuse request fields that would change the answer and that cannot be honored, by their names.

Knows what the APIs of OpenAI, Anthropic, vLLM, SGLang, llama.cpp and OpenRouter define beyond what
the gateway reads. Further fields are ignored; docs/protocols.md lists those that APIs define.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentrl_proxy.errors import ApiError, invalid

_EMPTY: list[Any] = []
_NEUTRAL: dict[str, Any] = {  # the value with which a field changes nothing
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "min_p", "top_a", "min_tokens", "mirostat",
         "no_repeat_ngram_size"), 0,
    ),
    **dict.fromkeys(
        ("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p", "tfs_z"), 1
    ),
    **dict.fromkeys(
        ("ignore_eos", "use_beam_search", "include_stop_str_in_output", "continue_final_message",
         "return_tokens_as_token_ids"), False,
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), True
    ),
    **dict.fromkeys(
        ("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors", "documents",
         "plugins", "transforms"), _EMPTY,
    ),
    **dict.fromkeys(
        ("web_search_options", "search_parameters", "audio", "mm_processor_kwargs", "vllm_xargs",
         "chat_template", "prompt_logprobs", "truncate_prompt_tokens", "thinking_budget",
         "thinking_token_budget", "guided_regex", "guided_choice", "guided_grammar",
         "guided_whitespace_pattern", "structural_tag", "regex", "ebnf", "grammar", "json_schema"),
        None,
    ),
}  # fmt: skip
_INSTEAD = {
    "functions": "send `tools`",
    "function_call": "send `tool_choice`",
    "extra_body": "put its fields into the body itself; openai's client does so",
}
OURS_ALONE = (
    "chat_template_kwargs", "enable_thinking", "reasoning", "guided_json", "structured_outputs",
)  # fmt: skip
"""Fields that our model takes and a provider's does not get."""


def refuse_unsupported(
    raw: Mapping[str, Any],
    unsupported: Mapping[str, str],
    *,
    ours: bool = True,
    passed_on: Collection[str] = (),
) -> None:
    """Refuse fields without which the answer would be a different one.

    Args:
        unsupported: more fields, of one protocol: what to do instead, by the field's name.
        ours: whether our own model answers; else a provider's.
        passed_on: what the provider gets.

    Raises:
        ApiError: one of them is set (400).
    """
    for name, instead in (*unsupported.items(), *_INSTEAD.items()):
        if raw.get(name) and name not in passed_on:
            raise _refusal(name, instead)
    if not ours:
        for name in OURS_ALONE:
            if raw.get(name) is not None:
                raise _refusal(
                    name, "a provider's model gets it from `params` in its [models] table"
                )
    for name in raw.keys() & _NEUTRAL.keys():
        value, neutral = raw[name], _NEUTRAL[name]
        if value is not None and value != neutral and name not in passed_on:
            only = "" if neutral in (None, _EMPTY) else f", or send {neutral!r}".lower()
            raise _refusal(name, f"leave it out{only}")


def _refusal(name: str, instead: str) -> ApiError:
    return invalid(name, f"{name} is not supported; {instead}", code="unsupported_parameter")
