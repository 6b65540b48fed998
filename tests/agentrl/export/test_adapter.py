"""``agentrl export``: which adapter is written, the base that it is for, and how to serve it."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import agentrl
from peft import AutoPeftModelForCausalLM, PeftModel
from tiny_policy import Policy, trained_run

from agentrl.config.commands import ServeConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.export.adapter import Exported, export, ollama
from agentrl.runs.folder import RunFolder, find_adapters
from agentrl_trainer.models.loading import CHAT_TEMPLATES, load_base


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def changed(run: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run, whose configuration a test may change."""
    shutil.copytree(run.root, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def exported(source: object, out: Path, model: str | None = None, merged: bool = False) -> Exported:
    return export(str(source), out, merged=merged, model=model, adapter=None)


def test_an_adapter_is_found_by_run_step_or_folder(run: RunFolder) -> None:
    newest = run.adapter_version("policy", 7)
    assert find_adapters(run.root, "x") == {"policy": newest}
    assert list(find_adapters(newest, "x").values()) == [newest]
    with pytest.raises(ConfigError, match=r"x: .* no adapter 'policy' of step 5; .*: 3, 7"):
        find_adapters(f"{run.root}@5", "x")
    with pytest.raises(ConfigError, match="no PEFT folder"):
        find_adapters(run.root / "logs", "x")


def test_an_export_is_the_model_that_was_trained(run: RunFolder, tmp_path: Path) -> None:
    peft, merged = tmp_path / "peft", tmp_path / "whole"
    exported(f"{run.root}@3", peft)
    done = agentrl("export", f"{run.root}@3", merged, "--merged")
    assert done.returncode == 0, done.stderr
    for said in (
        f"vllm serve {merged}",
        f"--outfile {merged / 'model.gguf'}",
        f"ollama create whole -f {merged / 'Modelfile'}",
    ):
        assert said in done.stdout
    ids = torch.arange(5, 25)[None]
    plain = load_base("agentrl-tiny", device="cpu").model(ids).logits
    base = load_base("agentrl-tiny", device="cpu").model
    adapted = PeftModel.from_pretrained(base, str(peft)).eval()(ids).logits
    whole = load_base(str(merged), device="cpu")
    torch.testing.assert_close(whole.model(ids).logits, adapted, atol=2e-4, rtol=0)
    assert (adapted - plain).abs().max() > 0.1
    assert whole.tokenizer.chat_template
    with pytest.raises(ConfigError, match="exists already"):
        exported(run.root, peft)


def test_an_export_is_whole_or_absent(run: RunFolder, tmp_path: Path) -> None:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="cannot be copied"):
            exported(run.root, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_the_modelfile_is_the_tokenizers(tmp_path: Path) -> None:
    tokenizer: Any = load_base("agentrl-tiny", device="cpu").tokenizer
    text = ollama.write_modelfile(tmp_path, tokenizer).read_text()
    assert text.startswith("FROM ./model.gguf\n")
    assert "PARAMETER stop <|im_end|>\n" in text
    # Go's template, done by hand: a turn for each message, then the beginning of the answer.
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    loop, after = template.removeprefix("{{- range .Messages }}").split("{{ end }}")
    probe = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello\nyou"}]
    turns = [
        loop.replace("{{ .Role }}", one["role"]).replace("{{ .Content }}", one["content"])
        for one in probe
    ]
    rendered = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
    assert "".join(turns) + after == rendered

    for other in ("{{ messages[0].content }}", "{{ raise_exception('no') }}", None):
        tokenizer.chat_template = other
        text = ollama.write_modelfile(tmp_path, tokenizer).read_text()
        assert text.startswith("FROM ./model.gguf\n")
        assert 'TEMPLATE """' not in text
        assert "not plain ChatML" in text


def test_commands_are_for_a_shell_whatever_a_folder_is_called(tmp_path: Path) -> None:
    out = tmp_path / "My model; x"
    Policy().become(0, tmp_path / "peft")
    servers = exported(tmp_path / "peft", out, "agentrl-tiny").servers
    ours, theirs = (shlex.split(servers[name][0]) for name in ("agentrl", "vLLM"))
    assert ours == ["agentrl", "serve", "--adapter-path", str(out), "--model", "agentrl-tiny"]
    assert theirs[-2:] == ["--lora-modules", f"peft={out}"]
    convert, create = map(shlex.split, ollama.commands(out))
    assert convert[2:] == [str(out), "--outfile", str(out / "model.gguf")]
    assert create == ["ollama", "create", "my model; x", "-f", str(out / "Modelfile")]


def test_a_base_that_the_adapter_was_not_trained_on_is_not_taken(
    changed: RunFolder, tmp_path: Path
) -> None:
    """As of a run that was resumed, or edited, with another model."""
    changed.write_json(changed.config, {"model": {"name": "Qwen/Qwen3-0.6B"}})
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen3-0.6B', but .*'agentrl-tiny'.*--model"):
        exported(changed.root, out)
    assert not out.exists()
    done = exported(changed.root, out, "agentrl-tiny")
    assert done.servers["agentrl"][0].endswith("--model agentrl-tiny")


@pytest.mark.parametrize("merged", [False, True])
def test_what_serves_a_trusted_model_says_so(
    run: RunFolder, changed: RunFolder, tmp_path: Path, merged: bool
) -> None:
    settings = {"model": {"name": "agentrl-tiny", "trust_remote_code": True}}
    changed.write_json(changed.config, settings)
    trusted = exported(changed.root, tmp_path / "trusted", merged=merged)
    plain = exported(run.root, tmp_path / "plain", merged=merged)
    for server in ("agentrl", "vLLM"):
        # This model has no code of its own after all, which a merged folder tells.
        assert ("--trust-remote-code" in trusted.servers[server][0].split()) is not merged
        assert "--trust" not in plain.servers[server][0]
    tokens = shlex.split(trusted.servers["agentrl"][0])[2:]
    assert load(ServeConfig, tokens, {}).model.trust_remote_code is not merged


def test_the_chat_template_of_the_training_is_exported(changed: RunFolder, tmp_path: Path) -> None:
    """Of a base model, which has none."""
    base = load_base("agentrl-tiny", device="cpu")
    base.tokenizer.chat_template = None
    for part in (base.model, base.tokenizer):
        part.save_pretrained(tmp_path / "base")
    model = str(tmp_path / "base")
    changed.write_json(changed.config, {"model": {"name": model, "chat_template": "role_colon"}})
    whole, peft = tmp_path / "whole", tmp_path / "peft"
    exported(changed.root, whole, model, merged=True)
    assert (
        load_base(str(whole), device="cpu").tokenizer.chat_template == CHAT_TEMPLATES["role_colon"]
    )
    servers = exported(changed.root, peft, model).servers
    assert (peft / "chat_template.jinja").read_text() == CHAT_TEMPLATES["role_colon"]
    assert f"--chat-template {peft}/chat_template.jinja" in servers["vLLM"][0]
    tokens = shlex.split(servers["agentrl"][0])[2:]
    assert load(ServeConfig, tokens, {}).model.chat_template == "role_colon"


def test_peft_finds_the_base_of_an_adapter_of_a_built_in_model(
    run: RunFolder, tmp_path: Path
) -> None:
    exported(run.root, tmp_path / "peft")
    model = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "peft"))
    assert model.active_adapters == ["default"]
    assert exported(tmp_path / "peft", tmp_path / "again", "agentrl-tiny").servers


@pytest.mark.parametrize(
    ("rank", "said"), [(16, "--enable-lora --lora"), (48, "--enable-lora --max-lora-rank 64 --l")]
)
def test_vllm_is_told_of_a_large_rank(rank: int, said: str, tmp_path: Path) -> None:
    Policy(rank).become(0, tmp_path / "peft")
    made = exported(tmp_path / "peft", tmp_path / "out", "agentrl-tiny")
    assert said in made.servers["vLLM"][0]


def test_a_folder_of_several_adapters_wants_a_choice(tmp_path: Path) -> None:
    for name in ("asker", "judge"):
        (tmp_path / "both" / name).mkdir(parents=True)
        config = json.dumps({"r": 4, "base_model_name_or_path": "agentrl-tiny"})
        (tmp_path / "both" / name / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError, match="adapter: choose one of asker, judge"):
        exported(tmp_path / "both", tmp_path / "out")
