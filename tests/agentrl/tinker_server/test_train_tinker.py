"""``agentrl train --backend tinker`` against our own server, through the official SDK."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file
from settings import nested
from training_run import SUPPORT, Run
from transformers import dynamic_module_utils

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.settings.sampler import TinkerSettings
from agentrl.gateway.process import GatewayPlan, make_sampler
from agentrl.runs.folder import find_adapters
from agentrl.training.session import RunError
from agentrl.training.setup.clients import TrainingClients, create_clients
from agentrl_tracer.schemas import SkipReason
from agentrl_trainer import tiny
from agentrl_trainer.models.sources import ModelError

pytestmark = [pytest.mark.tinker, pytest.mark.timeout(600)]


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here and in every process that is started."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HOME", str(tmp_path))


def config(**settings: Any) -> TrainConfig:
    agent = f"{SUPPORT / 'train_agents.py'}:steady"
    return TrainConfig(
        **nested(agent=agent, tasks=Path("tasks.jsonl"), backend="tinker", **settings)
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"estimator": "gae"}, "estimator"),
        ({"temperature": 0.7}, "temperature"),
        ({"alpha": 16}, "alpha"),
        ({"kl_coef": 0.1, "kl_reference": "here"}, "kl.reference"),
        ({"sampler": "vllm"}, "sampler.kind"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"load_in_4bit": True}, "load_in_4bit"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named}: .*tinker"):
        config(**settings)


def test_its_settings_mean_nothing_elsewhere() -> None:
    with pytest.raises(ValidationError, match=r"tinker\.base_url: has no effect without"):
        TrainConfig(
            **nested(
                agent="a:b", tasks=Path("t"), tinker_base_url="http://127.0.0.1:1", backend="local"
            )
        )


OWN = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class Own(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_trusted_code_of_a_model_is_run_here(
    key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trainer, which then misses the size that it will not ask such code for, and by the
    gateway. No server is asked."""
    model = tmp_path / "own"
    shutil.copytree(tiny.MODEL_DIR, model)
    known = json.loads((model / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (model / "config.json").write_text(json.dumps(known | {"model_type": "own", "auto_map": code}))
    (model / "own.py").write_text(OWN)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    trusting = config(model=str(model), trust_remote_code=True)
    with pytest.raises(RunError, match="learning_rate: is missing"):
        create_clients(trusting, tmp_path, print)
    plan = GatewayPlan.of(trusting, vllm_url=None, store="", tinker=TinkerSettings())
    sampler, renderer = make_sampler(plan)
    assert renderer.encode("I")
    assert sampler is not None
    plan.model.trust_remote_code = False
    with pytest.raises(ModelError, match="trust_remote_code"):
        make_sampler(plan)


def test_a_service_that_fails_at_the_end_does_not_spoil_it() -> None:
    class Gone:
        def close(self) -> None:
            raise ConnectionError("connection refused")

    gone: Any = Gone()
    TrainingClients(gone, {}, 8, None, 1e-3, failures=(ConnectionError,)).close()
    with pytest.raises(ConnectionError):  # a fault of ours
        TrainingClients(gone, {}, 8, None, 1e-3).close()


def weights(run: Run, served: Path) -> dict[str, Any]:
    """The final adapters' tensors; of a run on Tinker, from the server's own folder."""
    found: dict[str, Any] = {}
    names = [path.name for path in run.folder.adapters.iterdir()]
    for name in names:
        folder = run.folder.adapter / (name if len(names) > 1 else "")
        if (pointer := folder / "tinker.json").exists():
            model, kind, version = json.loads(pointer.read_text())["path"][9:].split("/")
            folder = served / model.replace(":", "-") / kind / version
        tensors = load_file(str(folder / "adapter_model.safetensors"))
        found |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
    return found


TWO_ADAPTERS = {
    "adapters": "asker,answerer", "steps": 1, "loss": "gspo", "kl_coef": 0.05,
    "length_normalization": "sequence",
}  # fmt: skip


@pytest.mark.parametrize(
    ("agent", "killed", "settings"),
    [
        pytest.param(
            "mixed", True, {"loss": "ppo", "epochs": 2}, marks=pytest.mark.kills,
            id="resumed, its loss",
        ),
        pytest.param("two_models", False, TWO_ADAPTERS, id="two adapters, a custom loss"),
    ],
)  # fmt: skip
def test_a_run_on_tinker_is_the_run_here(
    served: Any, key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    agent: str, killed: bool, settings: dict[str, Any],
) -> None:  # fmt: skip
    """With one runner both runs sample in one order."""
    settings = {
        "runners": 1, "steps": 2, "seed": 5, "eval_every": 9, "batch_size": 2, "group_size": 3,
        "lease": 5,
    } | settings  # fmt: skip
    here = Run(tmp_path / "here", agent, **settings).finish()
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    there = Run(tmp_path / "there", agent, backend="tinker", **settings)
    if killed:
        there.kill_at("publishing", 1)
    there.finish()

    there.accounting()
    rows, expected = there.curve(), here.curve()
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    of_sharing = ("tokens/saved_by_sharing", "tokens/total")  # the server's own affair
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name in {name for name in row if not name.endswith(of_sharing)}:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name
    for file in here.folder.tokens.iterdir():
        with np.load(file) as ours, np.load(there.folder.tokens / file.name) as theirs:
            for name in ("offsets", "trainer", "advantage"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=2e-5), name
    ours, theirs = weights(here, served.folder), weights(there, served.folder)
    assert ours.keys() == theirs.keys()
    # B begins at zero, so this is the update. Adam magnifies the last bits of small gradients.
    updates = [key for key in ours if "lora_B" in key]
    apart = sum(float((ours[key] - theirs[key]).square().sum()) for key in updates) ** 0.5
    assert apart < 5e-4 * sum(float(ours[key].square().sum()) for key in updates) ** 0.5
    with pytest.raises(ConfigError, match=r"tinker checkpoint download tinker://.*weights/step-"):
        find_adapters(there.folder.root, "adapter_path")


def test_what_it_cannot_learn_from_is_counted_and_the_run_goes_on(
    served: Any, key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    run = Run(
        tmp_path, "warm", backend="tinker", runners=1, steps=2, batch_size=1, group_size=3,
        eval_every=9,
    )  # fmt: skip
    process = run.start()
    run.output = process.communicate(timeout=150)[0]
    assert process.returncode == 1, run.output  # for nothing was learned
    assert "nothing was learned: 0 of 6 calls trained" in run.output
    books = run.accounting()
    assert books.adds_up
    assert (books.trained, books.pending) == (0, 0)
    assert books.skipped[SkipReason.OFF_POLICY] >= 3  # a group may have earned the same
    assert {row["step"] for row in run.curve()} == {0, 1, 2}
    assert "temperature: these answers were sampled at another" in " ".join(run.output.split())
