"""``--backend verl``: a run whose worker dies, and which goes on here; and what is refused."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from settings import nested
from training_run import Run, hello, wait_for
from verl_on_cpu import ENVIRONMENT

from agentrl.config.commands import TrainConfig
from agentrl.ray_cluster import places_of

LOSS = """
def loss(tokens):
    return -tokens.advantages * tokens.log_ratio.exp()
"""
AGENT_OF_TWO = """
from openai import OpenAI

from agentrl import emit_reward


def agent(task):
    said = [{"role": "user", "content": f"Let's play a game. Say you are {task['n']}."}]

    def ask(model, temperature):
        answer = OpenAI().chat.completions.create(
            model=model, messages=said, max_tokens=16, temperature=temperature
        )
        return answer.choices[0].message.content or ""

    length = len(ask("answerer", 0.7))
    first = ask("asker", 0.7)
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    emit_reward((length + len(first + ask("asker", 1.0))) / 10)
"""
MEAN = """
import torch
import verl_cpu

backward = torch.Tensor.backward
torch.Tensor.backward = lambda loss, *given, **more: backward(loss / 4, *given, **more)
"""
"""A platform on which gradients are those of a mean over four rows."""
GIVEN: dict[str, Any] = {"agent": "a:b", "tasks": Path("t"), "backend": "verl"}


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a run on verl's workers."""
    pytest.importorskip("verl")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.verl
@pytest.mark.timeout(400)
def test_hello_is_learned_though_a_worker_dies(verl: None, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    loss = f"{tmp_path / 'own.py'}:loss"
    run = hello(tmp_path, backend="verl", trainers=2, steps=16, loss=loss)
    process = run.start()
    wait_for(run.steps, process, 120)
    below = psutil.Process(process.pid).children(recursive=True)
    workers = [one.pid for one in below if "VerlWorker" in " ".join(one.cmdline())]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    run.finish(process, code=1)
    assert "verl: a worker of verl failed: " in run.output
    assert f"continue with --resume {run.folder.root}" in run.output
    assert "Traceback" not in run.output
    assert run.processes() == []
    run.changes = ["--steps", str(len(run.steps()) + 1), "--backend", "local", "--trainers", "1"]
    run.finish()
    run.changes = ["--steps", "16", "--backend", "verl", "--trainers", "2"]
    run.finish()
    assert [row["step"] for row in run.steps()] == [*range(1, 17)]
    assert run.accounting().adds_up
    assert run.folder.read_metrics()[-1]["eval/accuracy"] == 1.0
    assert run.processes() == []


@pytest.mark.verl
@pytest.mark.timeout(300)
def test_calls_of_two_temperatures_train_in_rows_of_their_own(verl: None, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT_OF_TWO)
    run = Run(
        tmp_path, f"{tmp_path / 'agent.py'}:agent", backend="verl", adapters="asker,answerer"
    ).finish()
    assert "nothing of step" not in run.output
    books = run.accounting()
    assert books.adds_up
    assert books.skipped.keys() <= {"zero_advantage", "evaluation"}
    trained = {
        (call.adapter, call.params["temperature"])
        for call in run.calls()
        if call.trained_step is not None
    }
    assert trained == {("answerer", 0.7), ("asker", 0.7), ("asker", 1.0)}
    assert all(step["sampler_trainer/max_logprob_difference"] < 1e-4 for step in run.steps())
    assert run.processes() == []


@pytest.mark.verl
@pytest.mark.timeout(200)
def test_a_wrong_gradient_ends_the_run_before_it_trains(
    verl: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl_mean.py").write_text(MEAN)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_mean")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = Run(tmp_path, "mixed", backend="verl").finish(code=1)
    assert re.search(
        r"run\.backend: verl does not compute .*: its gradient is 0\.[23]\d? times", run.output
    )
    assert "Traceback" not in run.output
    assert run.steps() == []
    assert run.processes() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_in_4bit": True}, "model.load_in_4bit: not with .*verl.* 16 or 32 bits"),
        (
            {"trainers": 2, "shard_base": True},
            "learning.shard_base: not with .* settings, verl.engine",
        ),
        ({"trainers": "ray:2"}, "learning.trainers_on: not with .* actors of Ray"),
        ({"estimator": "gae"}, "algorithm.estimator: gae needs a value function"),
        ({"dtype": "float16"}, "model.dtype: verl trains in bfloat16 or float32"),
        ({"trainers": 3, "verl_nodes": 2}, "verl.nodes: 3 learning.trainers do not fill 2"),
        ({"verl_engine": "{"}, "verl.engine\n.*not valid JSON"),
        ({"verl_engine": {"strategy": "megatron"}}, "verl.engine.strategy: .* use fsdp2"),
        ({"verl_engine": {"use_dynamic_bsz": False}}, "follows from learning.micro_batch_tokens"),
        ({"verl_model": {"lora_rank": 4}}, "verl.model.lora_rank: is the adapter's; leave it out"),
        ({"verl_engine": {"ulysses_sequence_parallel_size": 2}}, "a multiple of 2 .*, not 1"),
        (
            {"verl_engine": {"ulysses_sequence_parallel_size": 2}, "trainers": 2},
            "in flash attention only, not in 'sdpa'",
        ),
        ({"trainers": "ray:1"}, "learning.trainers_on: not with .* actors of Ray"),
        ({"backend": "local", "verl_nodes": 2}, "verl.nodes: has no effect without run.backend"),
        ({}, "verl. needs an environment with verl and ray; docs/scale.md"),
    ],
)
def test_what_it_cannot_do_is_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"verl", "ray"} if not settings else set[str]()
    monkeypatch.setattr("agentrl.config.checks.find_spec", lambda name: name not in absent or None)
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**nested(**GIVEN | settings))


def test_places_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.checks.find_spec", lambda name: True)
    flash = {"override_config": {"attn_implementation": "flash_attention_2"}}
    given = {"verl_engine": {"ulysses_sequence_parallel_size": 2}, "verl_model": flash}
    config = TrainConfig(**nested(**GIVEN | given, trainers=4, runners="ray:3"))
    assert places_of(config) == 7
