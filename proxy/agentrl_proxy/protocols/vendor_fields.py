"""Read or refuse the fields by which the APIs of different vendors ask for the same or for more.

Knows what OpenAI, Anthropic, DeepSeek, vLLM, SGLang, llama.cpp and OpenRouter define. What changes
the answer and cannot be honored is refused by its name. Further fields are ignored;
docs/protocols.md lists those that APIs define.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.protocols.chat_objects import ChatDialect
from agentrl_proxy.protocols.fields import read_object

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


def without_tools(raw: dict[str, Any], kinds: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a request without the tools of other types, and the types of these.

    Args:
        kinds: the types of tools that a client runs itself.
    """
    tools = raw.get("tools")
    if not isinstance(tools, list):
        return raw, []
    types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    hosted = [isinstance(one, str) and one not in kinds for one in types]
    kept = [tool for tool, out in zip(tools, hosted, strict=True) if not out]
    return {**raw, "tools": kept or None}, [
        str(one) for one, out in zip(types, hosted, strict=True) if out
    ]


def allowed_only(
    allowed: dict[str, Any], tools: list[dict[str, Any]]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the choice among the allowed tools, and these: the model sees no others."""
    names = [tool["function"]["name"] for tool in allowed["tools"]]
    known = [tool["function"]["name"] for tool in tools]
    if missing := [name for name in names if name not in known]:
        message = f"tool_choice allows {missing[0]!r}, which is not among the tools"
        raise invalid("tool_choice", message)
    return allowed["mode"], [tool for tool in tools if tool["function"]["name"] in names]


def guided_format(raw: dict[str, Any], dialect: ChatDialect) -> dict[str, Any] | None:
    """Return vLLM's fields for JSON as a ``response_format``."""
    outputs = raw.get("structured_outputs") or {}
    for name in ("regex", "choice", "grammar", "structural_tag"):
        if outputs.get(name) is not None:
            where = f"structured_outputs.{name}"
            message = f"{where} is not supported; send `json`, a JSON schema"
            raise invalid(where, message, code="unsupported_parameter")
    where, schema = "guided_json", raw.get("guided_json")
    if schema is None:
        where, schema = "structured_outputs.json", outputs.get("json")
    if schema is None and not outputs.get("json_object"):
        return None
    if raw.get("response_format") is not None:
        raise invalid(where, f"{where} and response_format exclude each other; send one of them")
    dialect.names = ((r"^response_format(\.json_schema)?(\.schema)?\b", where),)
    if schema is None:
        return {"type": "json_object"}
    if isinstance(schema, str):
        schema = read_object(schema.encode("utf-8", "surrogatepass"), where)
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}


def asked_thinking(raw: dict[str, Any]) -> tuple[bool | None, str | None]:
    """Return whether the model is to think, and how much, as several APIs say it."""
    reasoning = raw.get("reasoning") or {}  # OpenRouter's
    effort = raw.get("reasoning_effort") or reasoning.get("effort")
    kind = (raw.get("thinking") or {}).get("type")  # DeepSeek's and Anthropic's
    said = {"disabled": False, "enabled": True, "adaptive": True}.get(kind or "")
    for thinking in (raw.get("enable_thinking"), said, reasoning.get("enabled")):
        if thinking is not None:
            return thinking, effort
    return None if effort is None else effort != "none", effort
