"""A Modelfile for Ollama beside a merged model.

The Modelfile names a GGUF file, which llama.cpp's ``convert_hf_to_gguf.py`` makes of the folder:
Ollama itself imports safetensors of few architectures, which of them depends on its version, and
newer ones run such imports with MLX only (https://docs.ollama.com/import).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

_GGUF = "model.gguf"
_CHATML = '''\
TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
PARAMETER stop <|im_end|>
'''
_UNKNOWN = """\
# The tokenizer's chat template is not plain ChatML. Ollama recognises many in the GGUF file: see
# what it took with `ollama show --template`, and if it is wrong write a TEMPLATE here:
# https://docs.ollama.com/modelfile#template
"""


def write_modelfile(folder: Path, tokenizer: Any) -> Path:
    """Write ``folder/Modelfile``, with a TEMPLATE where the tokenizer's own is ChatML.

    The template has no tools: for agents that call them serve the model with vLLM or ``agentrl
    serve``, which use the tokenizer's.
    """
    conversations = (("user",), ("system", "user"), ("user", "assistant", "user"))
    chatml = bool(getattr(tokenizer, "chat_template", None))
    for roles in conversations if chatml else ():
        turns = [{"role": role, "content": f"it is {role}"} for role in roles]
        expected = "".join(f"<|im_start|>{role}\nit is {role}<|im_end|>\n" for role in roles)
        try:
            said = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may refuse a conversation, in whatever way
            said = None
        chatml = chatml and said == expected + "<|im_start|>assistant\n"
    file = folder / "Modelfile"
    file.write_text(f"FROM ./{_GGUF}\n{_CHATML if chatml else _UNKNOWN}", encoding="utf-8")
    return file


def commands(folder: Path) -> list[str]:
    """From the merged model to ``ollama run``; the first is run in a checkout of llama.cpp."""
    whole = folder.resolve()
    gguf = str(whole / _GGUF)
    return [
        shlex.join(["python", "convert_hf_to_gguf.py", str(whole), "--outfile", gguf]),
        shlex.join(["ollama", "create", folder.name.lower(), "-f", str(folder / "Modelfile")]),
    ]
