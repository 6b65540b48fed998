"""The models that the samplers load: base, a random adapter, both merged, and these as GGUF."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter
from agentrl_trainer.models.sources import resolve_model


def prepare(folder: Path, model: str, rank: int) -> None:
    """Fill ``folder`` with ``base``, ``adapter`` and ``merged``, unless it has been done."""
    if (folder / "merged").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(resolve_model(model), folder / "base", dirs_exist_ok=True)
    base = load_base(str(folder / "base"), device="cpu", dtype="float32")
    peft = attach_adapter(replace(base), "policy", lora_config(rank, 2 * rank), seed=0)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:  # zero at the start, where every adapter is the base model
                parameter.normal_(0, 0.02)
    save_adapter(peft, "policy", folder / "adapter")
    merged = peft.merge_and_unload()
    merged.save_pretrained(folder / "merging")
    base.tokenizer.save_pretrained(folder / "merging")
    (folder / "merging").rename(folder / "merged")


def prepare_gguf(folder: Path, llama_cpp: Path) -> None:
    """Convert ``folder``'s models with the scripts of llama.cpp's sources."""

    def convert(script: str, source: str, to: str, *more: str) -> None:
        if not (folder / to).exists():
            part = folder / f"part-{to}"
            command = [sys.executable, str(llama_cpp / script), str(folder / source), *more]
            subprocess.run([*command, "--outfile", str(part)], check=True, capture_output=True)
            part.rename(folder / to)

    convert("convert_hf_to_gguf.py", "merged", "merged-f32.gguf", "--outtype", "f32")
    convert("convert_hf_to_gguf.py", "merged", "merged-q8_0.gguf", "--outtype", "q8_0")
    convert("convert_hf_to_gguf.py", "base", "base-f32.gguf", "--outtype", "f32")
    base = str(folder / "base")
    convert(
        "convert_lora_to_gguf.py", "adapter", "adapter.gguf", "--outtype", "f32", "--base", base
    )
