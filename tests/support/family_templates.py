"""Chat templates of the model families, written for tests: they say what the published ones say.

There is no model hub here, so these are no copies. They were written after the published
templates, in fewer words, for the messages that the gateway sends (text contents, no built-in
tools). ``test_formats.test_templates_say_what_the_published_ones_say`` compares them with the
copies that TRL ships, where TRL is installed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

_HERMES_TOOLS = """
{%- macro offered(tools) -%}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}{{ '\\n' }}</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endmacro -%}
{%- macro call(one) -%}
<tool_call>{{ '\\n' }}{"name": "{{ one.function.name }}", "arguments": \
{{ one.function.arguments | tojson }}}{{ '\\n' }}</tool_call>
{%- endmacro -%}
{%- macro result(i) -%}
{%- if i == 0 or messages[i - 1].role != 'tool' %}<|im_start|>user{% endif -%}
{{- '\\n<tool_response>\\n' ~ messages[i].content ~ '\\n</tool_response>' -}}
{%- if i + 1 == messages | length or messages[i + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endmacro -%}
"""

QWEN_2_5 = (
    _HERMES_TOOLS
    + """
{%- set given = messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' -}}
{{- messages[0].content if given else
    'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -}}
{%- if tools -%}{{- '\\n\\n' ~ offered(tools) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- result(loop.index0) -}}
{%- elif not (given and loop.first) -%}
{{- '<|im_start|>' ~ m.role -}}
{%- if m.content or not m.tool_calls -%}{{- '\\n' ~ m.content -}}{%- endif -%}
{%- for one in m.tool_calls or [] -%}{{- '\\n' ~ call(one) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

QWEN_3 = (
    _HERMES_TOOLS
    + """
{%- set given = messages[0].role == 'system' -%}
{%- if tools or given -%}
{{- '<|im_start|>system\\n' -}}
{%- if given -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools and given -%}{{- '\\n\\n' -}}{%- endif -%}
{%- if tools -%}{{- offered(tools) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(query=messages | length - 1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- result(loop.index0) -}}
{%- elif m.role == 'assistant' -%}
{%- set thought = m.reasoning_content or '' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.query and (loop.last or thought) -%}
{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ m.content.lstrip('\\n') -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{%- for one in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}{{- call(one) -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif not (given and loop.first) -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

LLAMA_3_1 = """
{%- macro turn(role, text) -%}
{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' ~ text ~ '<|eot_id|>' -}}
{%- endmacro -%}
{%- set given = messages[0].role == 'system' -%}
{{- bos_token -}}
{%- set about -%}
{%- if tools -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' -}}
{%- if given -%}{{- messages[0].content | trim -}}{%- endif -%}
{%- endset -%}
{{- turn('system', about) -}}
{%- set ns = namespace(offer=tools) -%}
{%- for m in messages -%}
{%- if given and loop.first -%}
{%- elif ns.offer -%}
{%- set ns.offer = none -%}
{%- set question -%}
{{- 'Given the following functions, please respond with a JSON for a function call ' -}}
{{- 'with its proper arguments that best answers the given prompt.\\n\\n' -}}
{{- 'Respond in the format {"name": function name, "parameters": ' -}}
{{- 'dictionary of argument name and its value}.Do not use variables.\\n\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson(indent=4)) ~ '\\n\\n' -}}{%- endfor -%}
{{- m.content | trim -}}
{%- endset -%}
{{- turn('user', question) -}}
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length > 1 -%}
{{- raise_exception('This model only supports single tool-calls at once!') -}}
{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
{%- set call = '{"name": "' ~ f.name ~ '", "parameters": ' ~ (f.arguments | tojson) ~ '}' -%}
{{- turn('assistant', call) -}}
{%- elif m.role == 'tool' -%}{{- turn('ipython', m.content | tojson) -}}
{%- else -%}{{- turn(m.role, m.content | trim) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

DEEPSEEK_V3 = """
{%- set ns = namespace(after_tool=false, called=false, results=false) -%}
{{- bos_token -}}
{%- for m in messages if m.role == 'system' -%}
{{- ('' if loop.first else '\\n\\n') ~ m.content -}}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set ns.after_tool = false -%}
{{- '<｜User｜>' ~ m.content -}}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{%- set ns.after_tool = false -%}
{%- for one in m.tool_calls -%}
{{- '\\n' if ns.called else '<｜Assistant｜>' ~ m.content ~ '<｜tool▁calls▁begin｜>' -}}
{%- set ns.called = true -%}
{{- '<｜tool▁call▁begin｜>' + one.type + '<｜tool▁sep｜>' + one.function.name -}}
{{- '\\n```json\\n' + one.function.arguments + '\\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' -}}
{%- set ns.after_tool = false -%}
{{- m.content ~ '<｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'tool' -%}
{{- '' if ns.results else '<｜tool▁outputs▁begin｜>' -}}
{%- set ns.results = true -%}
{%- set ns.after_tool = true -%}
{{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if ns.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
{%- if add_generation_prompt and not ns.after_tool -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""
"""With the published one's oddity: only the first call of a conversation opens a turn."""

DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    "{{- '<｜Assistant｜>' -}}{%- endif", "{{- '<｜Assistant｜><think>\\n' -}}{%- endif"
)

DEEPSEEK_V3_1 = """
{%- set ns = namespace(asked=false, after_tool=false) -%}
{{- bos_token -}}
{%- for m in messages if m.role == 'system' -%}
{{- ('' if loop.first else '\\n\\n') ~ m.content -}}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set ns.asked = true -%}{%- set ns.after_tool = false -%}
{{- '<｜User｜>' ~ m.content -}}
{%- elif m.role == 'assistant' -%}
{{- '<｜Assistant｜></think>' if ns.asked else '' -}}
{%- set ns.asked = false -%}{%- set ns.after_tool = false -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for one in m.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + one.function.name + '<｜tool▁sep｜>' -}}
{{- one.function.arguments + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'tool' -%}
{%- set ns.asked = false -%}{%- set ns.after_tool = true -%}
{{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
"""

_CHATML = ["<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family as tests need it: its template, special tokens and how it writes a call."""

    template: str
    special: list[str]
    bos: str | None
    eos: str
    call: str  # of str.format(name=..., arguments=...)
    calls: str = "{}"  # around all calls of a message
    between: str = "\n"
    parallel: bool = True
    published: str | None = None  # the file in TRL's chat_templates

    def tokenizer(self, base: Any) -> Any:
        """The base's vocabulary with this family's special tokens and template."""
        made = copy.deepcopy(base)
        made.add_special_tokens({"additional_special_tokens": [*self.special, "<|python_tag|>"]})
        made.bos_token = self.bos
        made.eos_token = self.eos
        made.chat_template = self.template
        return made

    def said(self, *calls: tuple[str, str]) -> str:
        """What a model of this family writes to make these calls."""
        written = [self.call.format(name=name, arguments=arguments) for name, arguments in calls]
        return self.calls.format(self.between.join(written))


_HERMES_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
_V3_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜>"
)
_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_DS = (_DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

FAMILIES = {
    "qwen2.5": Family(QWEN_2_5, _CHATML, None, "<|im_end|>", _HERMES_CALL, published="qwen2_5"),
    "qwen3": Family(QWEN_3, _CHATML, None, "<|im_end|>", _HERMES_CALL, published="qwen3"),
    "llama3": Family(
        LLAMA_3_1, _LLAMA, "<|begin_of_text|>", "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}', parallel=False, published="llama3_1",
    ),
    "deepseek-v3": Family(DEEPSEEK_V3, *_DS, _V3_CALL, _CALLS),
    "deepseek-r1": Family(DEEPSEEK_R1, *_DS, _V3_CALL, _CALLS, published="deepseekv3"),
    "deepseek-v3.1": Family(
        DEEPSEEK_V3_1, *_DS,
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        _CALLS, between="",
    ),
}  # fmt: skip
