"""Chat templates for base models, whose tokenizers have none."""

from __future__ import annotations

TEMPLATES = {
    "role_colon": (
        "{%- for message in messages -%}"
        "{{ message.role | capitalize + ': ' + message.content | trim }}"
        "{{ eos_token if message.role == 'assistant' }}{{ '\n\n' }}"
        "{%- endfor -%}"
        "{{ 'Assistant:' if add_generation_prompt }}"
    ),
}
"""By name. ``role_colon`` writes ``User: ...``, ``Assistant: ...`` with empty lines between, as
tinker-cookbook's renderer of that name does; an answer ends with the tokenizer's end token. It has
no place for tools: neither definitions nor calls are written."""
