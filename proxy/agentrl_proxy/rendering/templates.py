"""Hold the response templates of model families: how they write reasoning and tool calls.

A tokenizer with a ``response_template`` of its own needs none of these. Qwen and Qwen 3.5 are from
transformers' server, without the end-of-turn marks, which never reach the parser here. The others
follow the chat templates that their authors publish.
"""

from __future__ import annotations

import re
from typing import Any

Template = dict[str, Any]

_THINK: Template = {"thinking": {"open": "<think>", "close": "</think>", "content": "text"}}
# Of a field that only keeps its ``open_pattern`` out of the content. An optional part of another
# pattern cannot: in pieces of text a pattern matches without its optional part.
_NOTHING: Template = {"close_pattern": "(?=.)", "content": "text", "repeats": True}
# Either the whole call is a JSON object, or a name stands before the arguments as one.
_WHOLE = "{content}"
_NAMED = {"name": "{name}", "arguments": "{content}"}


def _template(
    anchor: str | list[str], function: str | dict[str, str], calls: Template, fields: Template
) -> Template:
    transform = {"type": "function", "function": function}
    calls = {"repeats": True, "content": "json", "transform": transform, **calls}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchor,
        "fields": {**fields, "tool_calls": calls, "content": {"content": "text"}},
    }


def _deepseek(anchor: str | list[str], name: str, before_end: str) -> Template:
    """``name``: what follows a call's begin, up to the arguments; ``before_end``: what follows
    them."""
    calls = {
        "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>{name}",
        "close_pattern": rf"{before_end}<｜tool▁call▁end｜>",
    }
    end = {"open_pattern": r"\s*<｜tool▁calls▁end｜>", **_NOTHING}
    return _template(anchor, _NAMED, calls, {**_THINK, "end_of_calls": end})


QWEN = _template(
    "<|im_start|>assistant\n",
    _WHOLE,
    {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},
    _THINK,
)
"""Qwen 2, 2.5 and 3, and Hermes."""

QWEN_3_5 = _template(
    "<|im_start|>assistant\n",
    _NAMED,
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            # One line end on each side is the template's; others are the value's.
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
    },
    _THINK,
)

LLAMA_3 = _template(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    _WHOLE,
    # A message that is one JSON object is a call without delimiters.
    {"open_pattern": r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|parameters)"\s*:)'},
    {},
)
"""Llama 3.1, 3.2 and 3.3: one call a message; ``parameters`` instead of ``arguments``."""

DEEPSEEK_3 = _deepseek(
    "<｜Assistant｜>",
    r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
    r"\n```\s*",
)
"""DeepSeek V3 and R1."""

DEEPSEEK_3_1 = _deepseek(
    # To turn thinking off, its chat template closes a thought that it did not open.
    ["<｜Assistant｜></think>", "<｜Assistant｜>"],
    r"(?P<name>[^<\n]+)<｜tool▁sep｜>",
    "",
)

GPT_OSS = _template(
    "<|start|>assistant",
    _NAMED,
    {
        # The recipient stands before or after the channel. One call a message: <|call|> stops.
        "open_pattern": r"(?:"
        r" to=functions\.(?P<name>[^\s<]{1,256})<\|channel\|>(?:commentary|analysis)|"
        r"<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[^\s<]{1,256}))"
        r"(?: ?<\|constrain\|>)?(?: ?\w{1,32})?<\|message\|>"
    },
    {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": ["<|end|><|start|>assistant", "<|end|>"],
            "content": "text",
        },
        "header": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)"
            r"(?: ?<\|constrain\|>\w{1,32})?<\|message\|>",
            **_NOTHING,
        },
        "next_message": {"open_pattern": r"<\|end\|>|<\|start\|>assistant", **_NOTHING},
    },
)
"""OpenAI's harmony format: https://cookbook.openai.com/articles/openai-harmony"""

GLM_4_5 = _template(
    "<|assistant|>",
    _NAMED,
    {
        "open_pattern": r"\s*<tool_call>(?P<name>[^\s<]{1,256})",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*"
            r"<arg_value>(?P<value>.*?)</arg_value>"
        },
    },
    {"thinking": {**_THINK["thinking"], "open": ["<think>", "\n<think>"]}},
)
"""GLM 4.5, 4.6 and 4.7."""

GEMMA_4 = _template(
    ["<|turn>model\n", "<tool_response|>"],
    _NAMED,
    {
        "open_pattern": r"\s*<\|tool_call>call:(?P<name>[^\s{]{1,256})",
        "close": "<tool_call|>",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    },
    {"thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"}},
)

LFM_2 = _template(
    "<|im_start|>assistant\n",
    _WHOLE,
    {"open_pattern": r"\s*<\|tool_call_start\|>", "close": "<|tool_call_end|>", "content": "text"},
    _THINK,
)
"""LFM 2 and 2.5: calls are a list as Python writes it, ``[search(q='x'), stop()]``."""

MISTRAL = _template(
    "[/INST]",
    _NAMED,
    {
        "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\s\[]{1,256})"
        r"(?:\[CALL_ID\]\w{1,64})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
    },
    {"thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "text"}},
)
"""Ministral 3, Devstral 2, and Mistral Small from 3.2."""

# The first entry whose marks are all in a chat template tells its family.
_MARKS: tuple[tuple[tuple[str, ...], Template], ...] = (
    (("<｜tool▁sep｜>", "```json"), DEEPSEEK_3),
    (("<｜tool▁sep｜>",), DEEPSEEK_3_1),
    (("<｜Assistant｜>",), DEEPSEEK_3),
    (("<|start_header_id|>", '"parameters"'), LLAMA_3),
    (("<tool_call>", "<function="), QWEN_3_5),
    (("<|channel|>", "<|message|>"), GPT_OSS),
    (("<tool_call>", "<arg_key>"), GLM_4_5),
    (("<|tool_call>call:",), GEMMA_4),
    (("<|tool_call_start|>",), LFM_2),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
)


def response_template(chat_template: str) -> Template:
    """Return the response template of a chat template's family; QWEN for unknown ones."""
    found = (one for marks, one in _MARKS if all(mark in chat_template for mark in marks))
    return next(found, QWEN)


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns thinking on and off."""
_STATEMENT = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_OPTIONAL = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)\s*(?:is\s+(?:not\s+)?defined|\|\s*default)\b")
_GIVEN = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "pad_token", "unk_token", "strftime_now", "raise_exception",
}  # fmt: skip


def switches(chat_template: str) -> frozenset[str]:
    """Return the optional variables of a chat template, which a request may set."""
    code = "".join(_STATEMENT.findall(chat_template))
    found = set(_OPTIONAL.findall(code))
    for name in (*THINKING_SWITCHES, "reasoning_effort"):
        if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code) and not re.search(
            rf"\b(set|for)\s+{name}\b", code
        ):
            found.add(name)
    return frozenset(found - _GIVEN)
