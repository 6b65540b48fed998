"""``agentrl export``: a trained adapter as others serve it, by itself or merged into its base."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.errors import ConfigError
from agentrl.config.recorded import recorded
from agentrl.export import ollama
from agentrl.runs.folder import find_adapters, run_and_step
from agentrl.samplers.vllm.adapters import adapts_experts


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how to serve it: by whom, and the commands for that, in order."""

    folder: Path
    merged: bool
    servers: Mapping[str, Sequence[str]]


def export(
    source: str,
    out: Path,
    *,
    merged: bool,
    model: str | None,
    adapter: str | None,
    trust_remote_code: bool = False,
) -> Exported:
    """Writes a PEFT folder, or a whole model with the adapter merged into its weights.

    Args:
        source: a run folder, ``RUN@STEP``, or a PEFT folder.
        out: the folder to write; it must not exist.
        model: the base model; by default the run's.
        adapter: which adapter of the run, where there are several.
        trust_remote_code: to merge, run the code that comes with the base model. A run that did
            so is trusted with its own model.

    Raises:
        ConfigError: there is nothing to export, or ``out`` exists, or the base is not known.
        ModelError: the two cannot be merged.
    """
    name, peft = _the_adapter(source, adapter)
    if out.exists():
        raise ConfigError(f"out: {str(out)!r} exists already; give a folder that does not")
    base = model or _base_of(source, peft)
    if base is None:
        raise ConfigError(
            "model: neither the run nor adapter_config.json tells the base model; give --model"
        )
    trusted = trust_remote_code or (model is None and _run_trusts(source))
    if not merged:
        from agentrl_trainer.models.loading import resolve_model

        shutil.copytree(peft, out)
        trusting = _trusting(trusted)
        ours = shlex.join(
            ["agentrl", "serve", "--adapter-path", str(out), "--model", base, *trusting]
        )
        theirs = shlex.join(["vllm", "serve", resolve_model(base), *trusting])
        theirs = f"{theirs} {_lora_options(name, out)}"
        return Exported(out, False, {"agentrl": [ours], "vLLM": [theirs]})
    from agentrl.export.merge import merge

    merge(peft, base, out, trust_remote_code=trusted)
    trusting = _trusting("auto_map" in json.loads((out / "config.json").read_text("utf-8")))
    servers = {
        "agentrl": [shlex.join(["agentrl", "serve", "--model", str(out), *trusting])],
        "vLLM": [shlex.join(["vllm", "serve", str(out), *trusting])],
        "Ollama, by way of llama.cpp": ollama.commands(out),
    }
    return Exported(out, True, servers)


def _lora_options(name: str, folder: Path) -> str:
    """vLLM's, for one adapter."""
    rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    options = "--enable-lora"
    if rank > 16:  # vLLM's own limit
        options += f" --max-lora-rank {1 << (rank - 1).bit_length()}"
    if not adapts_experts(folder):
        return f"{options} --lora-modules {shlex.quote(f'{name}={folder}')}"
    lora = json.dumps({"name": name, "path": str(folder), "is_3d_lora_weight": True})
    return f"{options} --enable-mixed-moe-lora-format --lora-modules {shlex.quote(lora)}"


def _the_adapter(source: str, name: str | None) -> tuple[str, Path]:
    found = find_adapters(source, "source")
    if name is None and len(found) > 1:
        raise ConfigError(f"adapter: choose one of {', '.join(sorted(found))}")
    name = name or next(iter(found))
    if name not in found:
        raise ConfigError(f"adapter: {name!r} is not there; there is {', '.join(sorted(found))}")
    return name, found[name]


def _run_trusts(source: str) -> bool:
    """Whether the run behind ``source``, if it is one, ran the code that comes with its model."""
    run, _ = run_and_step(source)
    return run.config.is_file() and bool(recorded(run.read_config(), "model.trust_remote_code"))


def _trusting(trusted: bool) -> list[str]:
    """The flag of agentrl's and vLLM's servers."""
    return ["--trust-remote-code"] if trusted else []


def _base_of(source: str, peft: Path) -> str | None:
    """The base model by the name that the run has for it, else as PEFT's folder tells.

    Raises:
        ConfigError: the two mean different models.
    """
    from agentrl_trainer.models.loading import ModelError, resolve_model

    run, _ = run_and_step(source)
    written = json.loads((peft / "adapter_config.json").read_text(encoding="utf-8"))
    trained_on: str | None = written.get("base_model_name_or_path")
    if not run.config.is_file():
        return trained_on
    named: str = recorded(run.read_config(), "model.name")
    places = {named}
    with contextlib.suppress(ModelError):  # a folder that is not there
        places.add(resolve_model(named))
    if trained_on is None or trained_on in places:
        return named
    raise ConfigError(
        f"model: the run's config.json says {named!r}, but its adapter was trained on "
        f"{trained_on!r} (adapter_config.json); give --model with the one that is right"
    )
