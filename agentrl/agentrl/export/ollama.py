"""A Modelfile for Ollama beside a merged model.

Knows Ollama's file format and one chat template in it; the rest is Ollama's and llama.cpp's. The
Modelfile names a GGUF file, which llama.cpp's ``convert_hf_to_gguf.py`` makes of the folder: Ollama
itself imports safetensors of few architectures, which of them depends on its version, and newer
ones run such imports with MLX only (https://docs.ollama.com/import).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GGUF = "model.gguf"
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_CHATML = f"""\
TEMPLATE \"\"\"{{{{- range .Messages }}}}{_BEGIN}{{{{ .Role }}}}
{{{{ .Content }}}}{_END}
{{{{ end }}}}{_BEGIN}assistant
\"\"\"
PARAMETER stop {_END}
"""
_UNKNOWN = """\
# The tokenizer's chat template is not plain ChatML. Ollama recognises many in the GGUF file: see
# what it took with `ollama show --template`, and if it is wrong write a TEMPLATE here:
# https://docs.ollama.com/modelfile#template
"""
_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)


def write_modelfile(folder: Path, tokenizer: Any) -> Path:
    """``folder/Modelfile``, with a TEMPLATE where the tokenizer's own is ChatML.

    The template has no tools: for agents that call them serve the model with vLLM or ``agentrl
    serve``, which use the tokenizer's.
    """
    file = folder / "Modelfile"
    template = _CHATML if speaks_chatml(tokenizer) else _UNKNOWN
    file.write_text(f"FROM ./{GGUF}\n{template}", encoding="utf-8")
    return file


def speaks_chatml(tokenizer: Any) -> bool:
    """Whether the tokenizer writes conversations as ``_CHATML`` does, found by trying."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    try:
        return all(
            tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
            == chatml(probe)
            for probe in _PROBES
        )
    except Exception:  # a template may refuse a conversation, in whatever way
        return False


def chatml(messages: Sequence[dict[str, str]]) -> str:
    """What Ollama makes of ``_CHATML``."""
    turns = [f"{_BEGIN}{one['role']}\n{one['content']}{_END}\n" for one in messages]
    return "".join(turns) + f"{_BEGIN}assistant\n"


def commands(folder: Path) -> list[str]:
    """From the merged model to ``ollama run``; the first is run in a checkout of llama.cpp."""
    whole = folder.resolve()
    return [
        shlex.join(["python", "convert_hf_to_gguf.py", str(whole), "--outfile", str(whole / GGUF)]),
        shlex.join(["ollama", "create", folder.name.lower(), "-f", str(folder / "Modelfile")]),
    ]
