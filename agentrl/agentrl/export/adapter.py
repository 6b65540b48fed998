"""``agentrl export``: a trained adapter as others serve it, by itself or merged into its base."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.export import ollama
from agentrl.runs.best_adapter import which_adapter
from agentrl.runs.folder import find_adapters, run_and_step
from agentrl.samplers.vllm.adapters import adapts_experts
from agentrl_trainer.models.saved_lora import is_reward_model
from agentrl_trainer.names import BUILT_IN

_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how to serve it: by whom, and the commands for that, in order."""

    folder: Path
    merged: bool
    servers: Mapping[str, Sequence[str]]
    which: str | None
    """Of which step of a run it is."""


def export(
    source: str,
    out: Path,
    *,
    merged: bool,
    model: str | None,
    adapter: str | None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a PEFT folder, or a whole model with the adapter merged into its weights.

    Args:
        source: a run folder, ``RUN@STEP``, ``RUN@best``, or a PEFT folder.
        out: the folder to write; it must not exist.
        model: the base model; by default the run's.
        adapter: which adapter of the run, where there are several.
        trust_remote_code: to merge, run the code that comes with the base model. A run that did
            so is trusted with its own model.

    Raises:
        ConfigError: there is nothing to export, or ``out`` exists, or the base is not known.
        ModelError: the two cannot be merged.
    """
    from agentrl_trainer.checkpoint import atomic_folder
    from agentrl_trainer.models.sources import resolve_model

    found = find_adapters(source, "source")
    if adapter is None and len(found) > 1:
        raise ConfigError(f"adapter: choose one of {', '.join(sorted(found))}")
    if (name := adapter or next(iter(found))) not in found:
        raise ConfigError(f"adapter: {name!r} is not there; there is {', '.join(sorted(found))}")
    if out.exists():
        raise ConfigError(f"out: {str(out)!r} exists already; give a folder that does not")
    run, _ = run_and_step(source)
    settings = run.read_config() if run.config.is_file() else {}
    base = model or _base_of(recorded(settings, "model.name"), found[name])
    trusted = trust_remote_code or (
        model is None and recorded(settings, "model.trust_remote_code", False)
    )
    template = recorded(settings, "model.chat_template")
    if merged:
        from agentrl.export.merge import merge

        merge(found[name], base, out, trust_remote_code=trusted, chat_template=template)
        trusted = "auto_map" in _read(out / "config.json")
        ours, theirs = ["--model", str(out)], [str(out)]
    else:
        try:
            with atomic_folder(out) as staging:
                shutil.copytree(found[name], staging, dirs_exist_ok=True)
                _complete(staging, base, template)
        except shutil.Error as error:  # of each file: source, target and reason
            raise OSError(f"the adapter cannot be copied: {error.args[0][0][2]}") from error
        ours = ["--adapter-path", str(out), "--model", base]
        theirs = [resolve_model(base), *_lora_options(name, out)]
        if template is not None:
            ours += ["--model.chat-template", template]
            theirs += ["--chat-template", str(out / _TEMPLATE)]
    trusting = ["--trust-remote-code"] if trusted else []
    servers = {
        "agentrl": [shlex.join(["agentrl", "serve", *ours, *trusting])],
        "vLLM": [shlex.join(["vllm", "serve", *theirs, *trusting])],
    }
    if merged:
        servers["Ollama, by way of llama.cpp"] = ollama.commands(out)
    if is_reward_model(found[name]):
        auto = "AutoModel" if merged else "AutoPeftModel"
        options = "num_labels=1"
        padding = None if merged else _padding(base, trusted, template)
        if padding is not None:
            options += f", pad_token_id={padding}"
        load = [f"{auto}ForSequenceClassification.from_pretrained({str(out)!r}, {options})"]
        if padding is not None:
            load.append(f"tokenizer.pad_token_id = {padding}  # of the base, for batches")
        train = shlex.join(["agentrl", "train", "AGENT", "--rewards", f"model:{out}"])
        servers = {"transformers": load} if merged else {"agentrl": [train], "PEFT": load}
    return Exported(out, merged, servers, which_adapter(source, found))


def _padding(base: str, trusted: bool, template: str | None) -> int | None:
    """Return the token that pads a reward model's rows; None without the base's tokenizer."""
    from agentrl.export.merge import padding_of
    from agentrl_trainer.models.loading import load_facts
    from agentrl_trainer.models.sources import ModelError

    with contextlib.suppress(ModelError):  # the adapter is written; its base may be elsewhere
        facts = load_facts(base, trust_remote_code=trusted, chat_template=template)
        return padding_of(facts.tokenizer)
    return None


def _complete(peft: Path, base: str, template: str | None) -> None:
    """Write what only agentrl knows: where a built-in model is, and the chat template."""
    if base in BUILT_IN:
        from agentrl_trainer.models.sources import resolve_model

        config = _read(peft / "adapter_config.json")
        config["base_model_name_or_path"] = resolve_model(base)
        (peft / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if template is not None:
        from agentrl_trainer.models.loading import CHAT_TEMPLATES

        (peft / _TEMPLATE).write_text(CHAT_TEMPLATES[template], encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _lora_options(name: str, folder: Path) -> list[str]:
    """vLLM's, for one adapter."""
    rank = _read(folder / "adapter_config.json")["r"]
    options = ["--enable-lora"]
    if rank > 16:  # vLLM's own limit
        options += ["--max-lora-rank", str(1 << (rank - 1).bit_length())]
    lora = f"{name}={folder}"
    if adapts_experts(folder):
        options.append("--enable-mixed-moe-lora-format")
        lora = json.dumps({"name": name, "path": str(folder), "is_3d_lora_weight": True})
    return [*options, "--lora-modules", lora]


def _base_of(named: str | None, peft: Path) -> str:
    """Return the base model by the name that the run has for it, else as PEFT's folder tells.

    Raises:
        ConfigError: the two mean different models, or neither names one.
    """
    from agentrl_trainer.models.sources import ModelError, resolve_model

    trained_on: str | None = _read(peft / "adapter_config.json").get("base_model_name_or_path")
    if named is None and trained_on is None:
        raise ConfigError(
            "model: neither the run nor adapter_config.json tells the base model; give --model"
        )
    places = {named}
    with contextlib.suppress(ModelError):  # a folder that is not there
        places.add(resolve_model(named or ""))
    if named and trained_on and trained_on not in places:
        raise ConfigError(
            f"model: the run's config.json says {named!r}, but its adapter was trained on "
            f"{trained_on!r} (adapter_config.json); give --model with the one that is right"
        )
    return str(named or trained_on)
