"""What comes after training: evaluating any model or checkpoint, exporting."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from agentrl.config.errors import ConfigError
from agentrl.export.adapter import export, ollama
from agentrl.runs.folder import RunFolder, find_adapters
from agentrl_tracer.schemas import Call
from agentrl_tracer.store import Store
from agentrl_trainer.models.loading import checkpoint_dtype, load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter

HELLO = Path(__file__).parents[3] / "examples" / "hello"
CLI = [sys.executable, "-m", "agentrl"]


def cli(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder as training leaves it: two versions of an adapter that changes the model."""
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "trained", "train")
    folder.write_json(folder.config, {"model": {"name": "agentrl-tiny"}})
    folder.run_id.write_text("run")
    peft = attach_adapter(load_base("agentrl-tiny", device="cpu"), "policy", lora_config(4, 4), 0)
    for version in (3, 7):
        with torch.no_grad():
            for name, weights in peft.named_parameters():
                if "lora_B" in name:
                    weights.normal_(std=0.05 * version)
        save_adapter(peft, "policy", folder.adapter_version("policy", version))
    return folder


def test_an_adapter_is_found_by_run_step_or_folder(run: RunFolder) -> None:
    newest = run.adapter_version("policy", 7)
    assert find_adapters(run.root, "x") == {"policy": newest}
    assert list(find_adapters(newest, "x").values()) == [newest]
    assert find_adapters(f"{run.root}@3", "x") == {"policy": run.adapter_version("policy", 3)}
    with pytest.raises(ConfigError, match=r"x: .* no adapter 'policy' of step 5; .*: 3, 7"):
        find_adapters(f"{run.root}@5", "x")
    with pytest.raises(ConfigError, match="no PEFT folder"):
        find_adapters(run.root / "logs", "x")


def test_an_export_is_the_model_that_was_trained(run: RunFolder, tmp_path: Path) -> None:
    said = cli("export", f"{run.root}@3", tmp_path / "peft")
    assert f"agentrl serve --adapter-path {tmp_path / 'peft'}" in said
    said = cli("export", f"{run.root}@3", tmp_path / "whole", "--merged")
    assert f"vllm serve {tmp_path / 'whole'}" in said
    assert f"--outfile {tmp_path / 'whole' / 'model.gguf'}" in said
    assert f"ollama create whole -f {tmp_path / 'whole' / 'Modelfile'}" in said
    ids = torch.arange(5, 25)[None]
    plain = load_base("agentrl-tiny", device="cpu").model(ids).logits
    base = load_base("agentrl-tiny", device="cpu").model
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()(ids).logits
    whole = load_base(str(tmp_path / "whole"), device="cpu")
    torch.testing.assert_close(whole.model(ids).logits, adapted, atol=2e-4, rtol=0)
    assert (adapted - plain).abs().max() > 0.1
    assert whole.tokenizer.chat_template
    assert "exists already" in cli("export", run.root, tmp_path / "peft", code=2)


def test_a_merged_model_is_as_large_as_its_base(tmp_path: Path) -> None:
    tiny = load_base("agentrl-tiny", device="cpu")
    stored = tmp_path / "base"
    tiny.model.to(torch.bfloat16).save_pretrained(stored)
    tiny.tokenizer.save_pretrained(stored)
    assert checkpoint_dtype(str(stored)) == torch.bfloat16
    base = load_base(str(stored), device="cpu")
    adapted = attach_adapter(base, "policy", lora_config(4, 8), 0)
    draw = torch.Generator().manual_seed(0)
    expected = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = layer.lora_A["policy"].weight, layer.lora_B["policy"].weight
            with torch.no_grad():
                b.copy_(torch.randn(b.shape, generator=draw) * 0.05)
            exact = layer.get_base_layer().weight.double() + 8 / 4 * b.double() @ a.double()
            expected[name.removeprefix("base_model.model.")] = exact.detach()
    save_adapter(adapted, "policy", tmp_path / "peft")

    whole = tmp_path / "whole"
    export(str(tmp_path / "peft"), whole, merged=True, model=str(stored), adapter=None)
    assert json.loads((whole / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(str(whole / "model.safetensors"))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (stored, whole)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert len(expected) == 21
    for name, exact in expected.items():  # rounded once: to the nearest of the type
        found = weights[f"{name}.weight"]
        assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
        assert (found != exact.to(torch.bfloat16)).float().mean() < 1e-3
    ids = torch.arange(5, 25)[None]
    merged = load_base(str(whole), device="cpu").model(ids).logits.log_softmax(-1)
    live = adapted(ids).logits.log_softmax(-1)
    plain = load_base(str(stored), device="cpu").model(ids).logits.log_softmax(-1)
    chosen = live.argmax(-1, keepdim=True)
    assert (merged - live).gather(-1, chosen).abs().max() < 0.05
    assert (plain - live).gather(-1, chosen).abs().max() > 0.2


def test_a_merged_model_keeps_in_float32_what_its_base_keeps(tmp_path: Path) -> None:
    """How this router corrects its scores: in bfloat16, other experts would be chosen."""
    tokenizer: Any = load_base("agentrl-tiny", device="cpu").tokenizer
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=32, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=0, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).to(torch.bfloat16)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    exact = torch.rand(4)
    model.get_buffer(bias).data = exact
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = load_base(str(tmp_path / "base"), device="cpu")
    save_adapter(
        attach_adapter(base, "policy", lora_config(4, 8, ["q_proj"]), 0), "policy", tmp_path / "p"
    )
    whole = tmp_path / "whole"
    export(str(tmp_path / "p"), whole, merged=True, model=str(tmp_path / "base"), adapter=None)
    weights = load_file(str(whole / "model.safetensors"))
    assert torch.equal(weights.pop(bias), exact)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((whole / "config.json").read_text())["dtype"] == "bfloat16"


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
    base = load_base("agentrl-tiny", device="cpu")
    save_adapter(attach_adapter(base, "a", lora_config(4, 4), 0), "a", tmp_path / "peft")
    out = tmp_path / "My model; x"
    source = str(tmp_path / "peft")
    done = export(source, out, merged=False, model="agentrl-tiny", adapter=None)
    said = [words for commands in done.servers.values() for words in map(shlex.split, commands)]
    assert said[0] == ["agentrl", "serve", "--adapter-path", str(out), "--model", "agentrl-tiny"]
    assert said[1][-2:] == ["--lora-modules", f"peft={out}"]
    convert, create = map(shlex.split, ollama.commands(out))
    assert convert[2:] == [str(out), "--outfile", str(out / "model.gguf")]
    assert create == ["ollama", "create", "my model; x", "-f", str(out / "Modelfile")]


def test_a_base_that_the_adapter_was_not_trained_on_is_not_taken(
    run: RunFolder, tmp_path: Path
) -> None:
    """As of a run that was resumed, or edited, with another model."""
    shutil.copytree(run.root, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.write_json(folder.config, {"model": {"name": "Qwen/Qwen3-0.6B"}})
    source, out = str(folder.root), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen3-0.6B', but .*'agentrl-tiny'.*--model"):
        export(source, out, merged=False, model=None, adapter=None)
    assert not out.exists()
    done = export(source, out, merged=False, model="agentrl-tiny", adapter=None)
    assert done.servers["agentrl"][0].endswith("--model agentrl-tiny")


@pytest.mark.parametrize("merged", [False, True])
def test_what_serves_a_trusted_model_says_so(run: RunFolder, tmp_path: Path, merged: bool) -> None:
    shutil.copytree(run.root, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    settings = folder.read_config()
    settings["model"]["trust_remote_code"] = True
    folder.write_json(folder.config, settings)
    trusted = export(
        str(folder.root), tmp_path / "trusted", merged=merged, model=None, adapter=None
    )
    plain = export(str(run.root), tmp_path / "plain", merged=merged, model=None, adapter=None)
    for server in ("agentrl", "vLLM"):
        # This model has no code of its own after all, which a merged folder tells.
        assert ("--trust-remote-code" in trusted.servers[server][0].split()) is not merged
        assert "--trust" not in plain.servers[server][0]


def test_vllm_is_told_of_a_large_rank(tmp_path: Path) -> None:
    for rank, said in ((16, "--enable-lora --lora"), (48, "--enable-lora --max-lora-rank 64 --l")):
        base = load_base("agentrl-tiny", device="cpu")
        save_adapter(attach_adapter(base, "a", lora_config(rank, 4), 0), "a", tmp_path / f"{rank}")
        out = tmp_path / f"out{rank}"
        done = export(
            str(tmp_path / f"{rank}"), out, merged=False, model="agentrl-tiny", adapter=None
        )
        assert said in done.servers["vLLM"][0]


def test_a_checkpoint_by_step_is_evaluated(run: RunFolder, tmp_path: Path) -> None:
    """The log-probs of the answers are those of that version, and of no other."""
    tasks = [json.loads(line) for line in (HELLO / "held_out.jsonl").read_text().splitlines()[:2]]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    folders = {step: find_adapters(f"{run.root}@{step}", "x")["policy"] for step in (3, 7)}
    cli(
        "eval", f"{HELLO / 'agent.py'}:agent", "--tasks", tmp_path / "tasks.jsonl",
        "--adapter-path", f"{run.root}@3", "--runs", tmp_path, "--runners", 1,
    )  # fmt: skip
    [folder] = tmp_path.glob("eval-*")
    store = Store(str(RunFolder(folder).store))
    rollouts = store.rollouts(store.runs()[0]["id"])
    calls = store.calls(rollout_ids=[rollout.id for rollout in rollouts])
    store.close()
    assert len(calls) == 2
    for call in calls:
        away = {step: distance(call, own) for step, own in folders.items()}
        assert away[3] < 1e-3 < 1e-2 < away[7]


def distance(call: Call, adapter: Path) -> float:
    """How far the recorded log-probs are from those of the base with an adapter, at most."""
    base = load_base("agentrl-tiny", device="cpu")
    model = PeftModel.from_pretrained(base.model, str(adapter)).eval()
    ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    found = scores[len(call.prompt_ids) - 1 :]
    return float((found - torch.tensor(call.response_logprobs)).abs().max())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Somebody else's model: a server that knows nothing of the run."""
    process = subprocess.Popen(
        [*CLI, "serve", "--port", "0", "--store", str(tmp_path / "other.db")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"http://[\d.]+:\d+", line)
        yield found[0]
        process.kill()


def test_other_models_are_evaluated_with_intervals(served: str, tmp_path: Path) -> None:
    config = tmp_path / "eval.toml"
    config.write_text(
        f'[agent]\nentrypoint = "{HELLO / "agent.py"}:agent"\n[rollouts]\nrunners = 2\n'
        f'[evaluation]\ntasks = "{HELLO / "held_out.jsonl"}"\nsamples = 2\ntemperature = 0.5\n'
        f'[run]\nfolder = "{tmp_path}"\n'
        f'[models.theirs]\nmodel = "openai/agentrl-tiny"\napi_base = "{served}/v1"\n'
    )
    said = cli("eval", "--config", config, "--answered-by", "theirs")
    [folder] = tmp_path.glob("eval-*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["not_enforced"] == {}
    for store in (Store(str(folder / "store.db")), Store(str(tmp_path / "other.db"))):
        with contextlib.closing(store):
            asked = {call.params["temperature"] for call in store.calls()}
        assert asked == {0.5}  # ours, whatever the agent asks for
    assert (summary["tasks"], summary["rollouts"], summary["failures"]) == (24, 48, {})
    assert summary["pass_at_interval"]["1"] == summary["interval"]
    low, high = summary["interval"]
    assert low <= summary["accuracy"] <= high
    assert summary["pass_at"]["1"] == pytest.approx(summary["accuracy"])
    assert "pass@2" in said
    assert "95 % interval" in said
    assert "no [models.ours]" in cli("eval", "--config", config, "--answered-by", "ours", code=2)
