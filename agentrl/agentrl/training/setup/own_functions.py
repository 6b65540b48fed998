"""Load the functions that settings name, and try each before the run starts.

A function is ``module:function`` or ``path/to/file.py:function``: a loss, an estimator, a source
of tasks, weights of tasks.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.field_types import names_function
from agentrl.scoring.functions import load_function
from agentrl_tracer.schemas import Call, CallState, Json, Purpose, Reward, Rollout, RolloutState
from agentrl_trainer.data.members import Member, members_of
from agentrl_trainer.data.own_estimator import OwnEstimator, own_advantages
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import build_trajectories
from agentrl_trainer.own_function import said_by


def add_own_loss(config: TrainConfig) -> None:
    """Make ``algorithm.loss`` known to the learner, if it names a function.

    Raises:
        ConfigError: there is no such function.
        FunctionError: it does not fit; says what is wrong with it.
    """
    spec = config.algorithm.loss
    if not names_function(spec):
        return
    function = load_function(spec, "algorithm.loss")
    from agentrl_trainer.learner.own_loss import add_loss  # which loads torch

    add_loss(spec, function)


def own_estimator(config: TrainConfig) -> OwnEstimator | None:
    """Return the function that ``algorithm.estimator`` names, as one of rewards and members.

    Raises:
        ConfigError: there is no such function.
        FunctionError: it does not fit; says what is wrong with it.
    """
    spec = config.algorithm.estimator
    if not names_function(spec):
        return None
    function = load_function(spec, "algorithm.estimator")
    estimator: OwnEstimator = function
    if not _takes_members(function):
        estimator = wraps(function)(lambda rewards, _: function(rewards))
    own_advantages(_made_up_group(), estimator, min_group=2)
    return estimator


def _takes_members(function: Callable[..., Any]) -> bool:
    """Whether a second argument is required, or called "members"; others have their defaults."""
    try:
        names = [*inspect.signature(function).parameters.values()][1:2]
    except ValueError:  # a builtin
        return False
    required = [one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in names]
    return any(required) or any(one.name == "members" for one in names)


def generated_tasks(spec: str, count: int, seed: int) -> list[Json]:
    """Return the first ``count`` tasks that a generator function yields for a seed.

    Raises:
        ConfigError: there is no such function, or it yields something else.
        FunctionError: it cannot be called with a seed, or raises.
    """
    function = load_function(spec, "agent.tasks")
    with said_by(function, "agent.tasks"):
        tasks = list(islice(function(seed), count))
    if not tasks:
        raise ConfigError(f"agent.tasks: {spec} yields no tasks")
    for number, task in enumerate(tasks, start=1):
        if not isinstance(task, dict):
            raise ConfigError(f"agent.tasks: {spec}: task {number} is {task!r:.80}, no object")
    try:  # as they are stored: tuples become lists
        return [json.loads(json.dumps(task, allow_nan=False)) for task in tasks]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent.tasks: {spec}: a task is no JSON: {error}") from None


def _made_up_group() -> list[Member]:
    """Return three members with two turns each, which earned 0, 1 and 0.5."""
    rollouts = [
        Rollout(
            f"rollout-{at}", "run", "run-train-0", "group", Purpose.TRAIN, 1, at, at,
            RolloutState.SUCCEEDED, None, 1, f"attempt-{at}", 0.0, 0.0, 1.0,
        )
        for at in range(3)
    ]  # fmt: skip
    calls = [
        Call(
            f"call-{at}-{turn}", f"call-{at}-{turn}", 0, "run", one.id, one.winner, turn, None,
            "policy", "policy", 0, CallState.COMPLETED, [1, 2, turn], [3, 4], [-0.5, -1.0 - at],
            "stop", {}, {"messages": []}, None, None, None, None, 0.0, 1.0,
        )
        for at, one in enumerate(rollouts)
        for turn in range(2)
    ]  # fmt: skip
    rewards = [
        Reward(f"attempt-{at}", one.id, "reward", value, key=one.id)
        for at, (one, value) in enumerate(zip(rollouts, (0.0, 1.0, 0.5), strict=True))
    ]
    rules = SkipRules(max_length=100)
    return members_of(rollouts, calls, rewards, rules, calls, build_trajectories)[0]
