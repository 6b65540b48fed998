"""Read fields by which different APIs ask for the same: thinking, JSON answers, allowed tools.

Knows fields of OpenAI's, Anthropic's, vLLM's, DeepSeek's and OpenRouter's chats, once checked.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.errors import invalid
from agentrl_proxy.protocols.chat_objects import ChatDialect
from agentrl_proxy.protocols.fields import read_object


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
    said = {"disabled": False, "enabled": True, "adaptive": True}.get(kind)
    for thinking in (raw.get("enable_thinking"), said, reasoning.get("enabled")):
        if thinking is not None:
            return thinking, effort
    return None if effort is None else effort != "none", effort
