"""Functions of users: what is tried before a run starts, and what each wrong one is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import nested

from agentrl.cli.tasks import training_tasks
from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.training.setup.own_functions import add_own_loss, own_estimator
from agentrl_trainer.learner.losses import LOSSES
from agentrl_trainer.own_function import FunctionError


@pytest.fixture(autouse=True)
def known_losses() -> Iterator[None]:
    """Forget the losses that a test has added."""
    before = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(before)


SOURCE = """
import torch

def centered(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]

def last_turn(rewards, members):
    return [[0.0] * (len(m.turns) - 1) + [r] for r, m in zip(rewards, members)]

def too_few(rewards):
    return rewards[1:]

def wrong_turns(rewards, members):
    return [[1.0]] * len(rewards)

def endless(rewards):
    return [float("nan")] * len(rewards)

def breaks(rewards):
    return rewards / 2

def none(*, rewards):
    return rewards

def surrogate(tokens):
    ratio = tokens.log_ratio.exp()
    return -ratio * tokens.advantages, ratio > 2

def summed(tokens):
    return (-tokens.lp * tokens.advantages).sum()

def constant(tokens):
    return tokens.advantages * 1.0

def two(tokens, options):
    return tokens.lp

number = 3

def naturals(seed):
    n = seed
    while True:
        yield {"n": n}
        n += 1

def nothing(seed):
    return iter(())

def words(seed):
    yield "word"

def tuples(seed):
    while True:
        yield {"n": (1,)}

def arrays(seed):
    import numpy
    yield {"n": numpy.int64(1)}

def nans(seed):
    yield {"n": float("nan")}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    path = tmp_path / "own_code.py"
    path.write_text(SOURCE)
    return path


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**nested(**{"agent": "x:y", "tasks": "tasks.jsonl"} | settings))


def test_functions_that_fit_are_taken(file: Path) -> None:
    loss = f"{file}:surrogate"
    chosen = config(loss=loss, estimator=f"{file}:centered")
    add_own_loss(chosen)
    estimator = own_estimator(chosen)
    assert estimator is not None
    assert estimator([1.0, 0.0], []) == [0.5, -0.5]
    own_estimator(config(estimator=f"{file}:last_turn"))
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    value, sums = LOSSES[loss](
        lp, torch.tensor([-1.0, -4.0]), torch.tensor([1.0, 2.0]), {"kl_coef": 0.0}
    )
    assert value.item() == pytest.approx(-1 - 2 * torch.tensor(2.0).exp().item())
    assert sums["clipped"] == 1


def test_defaults_of_an_estimator_are_its_own(file: Path) -> None:
    file.write_text(
        "def scaled(rewards, factor=2.0): return [factor * r for r in rewards]\n"
        "def told(rewards, members=None): return [float(len(members))] * len(rewards)\n"
        "def starred(*given): return [float(len(given))] * len(given[0])\n"
    )
    for name, expected in (("scaled", [2.0, 0.0]), ("told", [0.0, 0.0]), ("starred", [1.0, 1.0])):
        estimator = own_estimator(config(estimator=f"{file}:{name}"))
        assert estimator is not None
        assert estimator([1.0, 0.0], []) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "too_few"}, "too_few: it returned 2 values for 3 members"),
        ({"estimator": "wrong_turns"}, "it returned 1 numbers for the 2 turns of member 1"),
        ({"estimator": "endless"}, "it returned .nan, nan. for member 1, which is not finite"),
        ({"estimator": "breaks"}, r"breaks: TypeError: .*own_code.py, line \d+"),
        (
            {"estimator": "none"},
            "none: TypeError: none.. takes 0 positional arguments but 1 was given",
        ),
        ({"estimator": "missing"}, "own_code.py defines no 'missing'"),
        ({"estimator": "number"}, "is no function but 3"),
        ({"loss": "summed"}, r"summed: it must return a tensor of shape \[3\], .* not shape \[\]"),
        ({"loss": "constant"}, "constant: its value has no gradient"),
        (
            {"loss": "two"},
            "two: TypeError: two.. missing 1 required positional argument",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_refused(
    file: Path, settings: dict[str, str], message: str
) -> None:
    [(name, function)] = settings.items()
    check = {"loss": add_own_loss, "estimator": own_estimator}[name]
    with pytest.raises((ConfigError, FunctionError), match=rf"^algorithm.{name}: .*{message}"):
        check(config(**{name: f"{file}:{function}"}))


def test_a_module_that_breaks_is_told(file: Path) -> None:
    file.write_text("raise OSError('no such disk')\ndef f(rewards): ...")
    with pytest.raises(ConfigError, match="cannot be imported: OSError: no such disk"):
        own_estimator(config(estimator=f"{file}:f"))


def test_an_estimator_of_single_rollouts_needs_no_group(file: Path) -> None:
    single = {"estimator": f"{file}:centered", "group_size": 1}
    with pytest.raises(ValueError, match=r"rollouts\.group_size: 1 is too small"):
        config(**single)
    config(**single, min_group=1)


def test_a_generator_gives_what_the_steps_take(file: Path) -> None:
    source: Any = {"tasks": f"{file}:naturals", "seed": 5, "batch_size": 2}
    assert training_tasks(config(**source, steps=2)) == [{"n": n} for n in (5, 6, 7, 8)]
    with pytest.raises(ConfigError, match=r"run\.steps: is missing"):
        training_tasks(config(**source))
    tuples: Any = {**source, "tasks": f"{file}:tuples"}  # as they come back from a store
    assert training_tasks(config(**tuples, steps=1)) == [{"n": [1]}] * 2
    for function, message in (
        ("nothing", "yields no tasks"),
        ("words", "task 1 is 'word'"),
        ("arrays", "a task is no JSON: Object of type int64"),
        ("nans", "a task is no JSON: Out of range float"),
    ):
        with pytest.raises(ConfigError, match=f"agent.tasks: .*{function}.*{message}"):
            training_tasks(config(**source | {"tasks": f"{file}:{function}"}, steps=2))
