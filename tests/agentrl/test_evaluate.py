"""What comes after training: evaluating any model or checkpoint, exporting."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from agentrl.config import ConfigError
from agentrl.run_folder import RunFolder, find_adapters
from agentrl_trainer.model import attach_adapter, load_base, lora_config, save_adapter

HELLO = Path(__file__).parents[2] / "examples" / "hello"
CLI = [sys.executable, "-m", "agentrl.cli"]


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
    folder.write_json(folder.config, {"model": "agentrl-tiny"})
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
    ids = torch.arange(5, 25)[None]
    plain = load_base("agentrl-tiny", device="cpu").model(ids).logits
    base = load_base("agentrl-tiny", device="cpu").model
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()(ids).logits
    whole = load_base(str(tmp_path / "whole"), device="cpu")
    torch.testing.assert_close(whole.model(ids).logits, adapted, atol=2e-4, rtol=0)
    assert (adapted - plain).abs().max() > 0.1
    assert whole.tokenizer.chat_template
    assert "exists already" in cli("export", run.root, tmp_path / "peft", code=2)


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
        f'agent = "{HELLO / "agent.py"}:agent"\ntasks = "{HELLO / "held_out.jsonl"}"\n'
        f'runs = "{tmp_path}"\nsamples = 2\nrunners = 2\ntemperature = 1.0\n'
        f'[models.theirs]\nmodel = "openai/agentrl-tiny"\napi_base = "{served}/v1"\n'
    )
    said = cli("eval", "--config", config, "--answered-by", "theirs")
    [folder] = tmp_path.glob("eval-*")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["tasks"], summary["rollouts"], summary["failures"]) == (24, 48, {})
    low, high = summary["interval"]
    assert low <= summary["accuracy"] <= high
    assert summary["pass_at"]["1"] == pytest.approx(summary["accuracy"])
    assert "pass@2" in said
    assert "95 % interval" in said
    assert "no [models.ours]" in cli("eval", "--config", config, "--answered-by", "ours", code=2)
