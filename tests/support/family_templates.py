"""Chat templates of the model families: the published ones, from TRL's copies.

TRL's DeepSeek V3 is R1's, which opens a thought. Those of V3 and V3.1 are made of it: V3.1 closes
a thought that it did not open, and writes calls without a code block.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def published(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


_DEEPSEEK_R1 = published("deepseekv3")
_DEEPSEEK_V3 = _DEEPSEEK_R1.replace("<think>\\n", "")
_DEEPSEEK_V3_1 = _DEEPSEEK_V3.replace("<｜Assistant｜>", "<｜Assistant｜></think>").replace(
    "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + "
    "tool['function']['arguments'] + '\\n' + '```'",
    "tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']",
)

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
    parallel: bool = True

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
        return self.calls.format("\n".join(written))


_HERMES_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
_V3_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜>"
)
_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_DS = (_DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

FAMILIES = {
    "qwen2.5": Family(published("qwen2_5"), _CHATML, None, "<|im_end|>", _HERMES_CALL),
    "qwen3": Family(published("qwen3"), _CHATML, None, "<|im_end|>", _HERMES_CALL),
    "llama3": Family(
        published("llama3_1"), _LLAMA, "<|begin_of_text|>", "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}', parallel=False,
    ),
    "deepseek-v3": Family(_DEEPSEEK_V3, *_DS, _V3_CALL, _CALLS),
    "deepseek-r1": Family(_DEEPSEEK_R1, *_DS, _V3_CALL, _CALLS),
    "deepseek-v3.1": Family(
        _DEEPSEEK_V3_1, *_DS,
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        _CALLS,
    ),
}  # fmt: skip
