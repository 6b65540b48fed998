"""Runs that start from saved weights: LoRAs made by PEFT, other runs, and their optimizers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_learner import gpt2, qwen3
from tiny_policy import Policy
from training_run import Run

from agentrl.config.errors import ConfigError
from agentrl.config.settings.learning import LearningSettings
from agentrl.config.settings.run import NewRunSettings
from agentrl.runs.folder import RunFolder
from agentrl.training.setup.initial_adapters import create_adapters, find_initial, new_run
from agentrl_trainer.client import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from agentrl_trainer.models.loading import load_base

TOKENS = [3, 7, 11, 19, 23, 31, 41]
NAMES = ["policy"]


def made_by_peft(folder: Path, **features: Any) -> torch.Tensor:
    """Save an adapter that differs from the base; return its log-probs of ``TOKENS``."""
    torch.manual_seed(5)
    model = get_peft_model(load_base("agentrl-tiny", device="cpu").model, LoraConfig(**features))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.05)
    model.save_pretrained(str(folder))
    base = load_base("agentrl-tiny", device="cpu").model
    loaded = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        scores = loaded(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def row() -> Datum:
    inputs: dict[str, Any] = {"target_tokens": TOKENS[1:], "weights": [1.0] * len(TOKENS[1:])}
    return Datum(ModelInput.from_ints(TOKENS[:-1]), inputs)


@contextlib.contextmanager
def started(
    root: Path, source: Path | None, *, names: list[str] = NAMES, **settings: Any
) -> Iterator[tuple[ServiceClient, dict[str, TrainingClient]]]:
    """The clients of a run that begins, or goes on: in a folder that has its copies."""
    learning = LearningSettings(init_adapter=source, **settings)
    folder = RunFolder(root)
    if not folder.initial.exists():
        new_run(NewRunSettings(folder=root.parent, name=root.name), "train", learning, names)
    with ServiceClient(folder=root, device="cpu") as service:
        yield service, create_adapters(service, "agentrl-tiny", learning, names, 0, folder)


def learn(client: TrainingClient, steps: int = 1) -> None:
    for _ in range(steps):
        client.forward_backward([row()], "cross_entropy").result()
        client.optim_step(AdamParams(1e-2)).result()


def weights(client: TrainingClient) -> dict[str, torch.Tensor]:
    found = client.local(lambda learner: learner.state_dict()).result()
    return {key.split("/", 2)[0] + key.split("/", 2)[2]: value for key, value in found.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "features",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
        {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
        {"r": 4, "target_modules": r".*layers\.1.*(gate|up)_proj", "lora_dropout": 0.1},
    ],
)
def test_a_lora_made_by_peft_goes_on_as_it_was(tmp_path: Path, features: dict[str, Any]) -> None:
    expected = made_by_peft(tmp_path / "theirs", **features)
    with started(tmp_path / "run", tmp_path / "theirs") as (_, clients):
        done = clients["policy"].forward([row()], "cross_entropy").result()
        found = torch.tensor(done.loss_fn_outputs[0]["logprobs"].tolist())
        assert torch.allclose(found, expected, atol=1e-5)
        learn(clients["policy"])
        saved = clients["policy"].save_weights_for_sampler(tmp_path / "saved").result()
    kept, mine = (
        load_file(Path(path) / "adapter_model.safetensors")
        for path in (tmp_path / "theirs", saved.path)
    )
    assert kept.keys() == mine.keys()
    assert not equal(kept, mine)


def test_a_run_goes_on_with_its_optimizer_and_needs_no_source(tmp_path: Path) -> None:
    """Two steps, a fork, two steps are four steps; a fork without the optimizer is another."""
    source = RunFolder(tmp_path / "source")
    with started(source.root, None) as (service, clients):
        learn(clients["policy"], 2)
        service.save_checkpoint(source.checkpoints, 2).result()
        clients["policy"].save_weights_for_sampler(source.adapter_version("policy", 2)).result()
        learn(clients["policy"], 2)
        expected = weights(clients["policy"])
    source.write_json(source.config, {})
    forks = {}
    for optimizer in (True, False):
        root, names = tmp_path / f"fork-{optimizer}", ["main"]
        how = {"init_optimizer": optimizer, "names": names}
        with started(root, Path(f"{source.root}@2"), **how) as (_, clients):
            learn(clients["main"], 2)
            forks[optimizer] = weights(clients["main"])
    assert equal(forks[True], expected)
    assert not equal(forks[False], expected)
    shutil.rmtree(source.root)
    with started(tmp_path / "fork-True", tmp_path / "gone", names=["main"]) as (_, clients):
        learn(clients["main"], 2)
        assert equal(weights(clients["main"]), expected)


def test_several_adapters_start_by_name(tmp_path: Path) -> None:
    for seed, name in enumerate(("asker", "answerer")):
        Policy(rank=4 + seed).become(seed, tmp_path / "both" / name)
    names = ["asker", "answerer"]
    with started(tmp_path / "run", tmp_path / "both", names=names) as (_, clients):
        for name in names:
            saved = clients[name].save_weights_for_sampler(tmp_path / name).result()
            file = "adapter_model.safetensors"
            assert equal(
                load_file(Path(saved.path) / file), load_file(tmp_path / "both" / name / file)
            )


def test_what_does_not_fit_is_refused_by_its_setting(tmp_path: Path) -> None:
    made_by_peft(tmp_path / "theirs", r=4, target_modules=["q_proj"])
    where = NewRunSettings(folder=tmp_path / "runs")

    def refused(source: Path, names: list[str] = NAMES, **settings: Any) -> str:
        with pytest.raises(ConfigError) as error:
            new_run(where, "train", LearningSettings(init_adapter=source, **settings), names)
        return str(error.value)

    theirs = tmp_path / "theirs"
    assert "learning.rank: 32 differs from the 4 of" in refused(theirs, rank=32)
    assert "learning.alpha: 2 differs from the 8 of" in refused(theirs, alpha=2)
    assert find_initial(LearningSettings(init_adapter=theirs, rank=4), NAMES)
    assert "learning.init_adapter: " in refused(tmp_path / "nowhere")
    assert "has no adapter a, b; it has theirs" in refused(theirs, ["a", "b"])
    assert "init_optimizer: " in refused(theirs, init_optimizer=True)
    made_by_peft(tmp_path / "dora", r=4, target_modules=["q_proj"], use_dora=True)
    assert "learning.init_adapter: " in (said := refused(tmp_path / "dora"))
    assert "use_dora = true" in said
    run = RunFolder(tmp_path / "run")
    shutil.copytree(theirs, run.adapter_version("policy", 3))
    run.write_json(run.config, {})
    assert "no checkpoint of step 3; kept are those of: none" in refused(
        run.root, init_optimizer=True
    )


@pytest.mark.parametrize("target", ["c_attn", "q_proj"])
def test_an_adapter_of_another_model_is_refused_by_its_layers(tmp_path: Path, target: str) -> None:
    model, conv = (gpt2(), True) if target == "c_attn" else (qwen3(), False)
    config = LoraConfig(r=4, target_modules=[target], fan_in_fan_out=conv)
    get_peft_model(model, config).save_pretrained(tmp_path / "x")
    with (
        pytest.raises(ConfigError, match=rf"learning\.init_adapter: .*{target}"),
        started(tmp_path / "run", tmp_path / "x"),
    ):
        pass


def test_train_starts_from_it(tmp_path: Path) -> None:
    made_by_peft(tmp_path / "theirs", r=4, target_modules=["q_proj", "v_proj"])
    run = Run(
        tmp_path, "mixed", steps=1, init_adapter=tmp_path / "theirs", eval_tasks=None,
        batch_size=2, group_size=2,
    ).finish()  # fmt: skip
    assert f"starts from {tmp_path / 'theirs'}" in "".join(run.output.split("\n"))
    places = (tmp_path / "theirs", run.folder.adapter_version("policy", 0))
    theirs, first = (load_file(place / "adapter_model.safetensors") for place in places)
    assert equal(first, theirs)
    assert run.folder.read_config()["learning"]["rank"] == 4
