"""Functions that settings name, and those of rewards: how they are loaded and called.

An entry of ``rewards`` is ``module:function``, ``file.py:function`` or ``model:RUN``. It names a
function of a ``Trace``, a function of a group's traces (``@group_reward``), an object of either
kind that can be called, or what makes such an object with its defaults: a class, or
``agentrl.rewards:NAME``. Each may be async.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.config.errors import ConfigError
from agentrl.config.settings.models import OtherModelSettings
from agentrl.runner.agent_spec import AgentSpecError, load_target, parse_agent, validate_agent
from agentrl_tracer.conventions import SCORED
from agentrl_tracer.store import Store

if TYPE_CHECKING:
    from agentrl.scoring.trace import Trace

Scores = float | Mapping[str, float] | None
"""A reward, several by name, or none: the rollout does not earn anything from this function."""
RewardOfTrace = Callable[["Trace"], Scores]
Function = TypeVar("Function", bound=Callable[..., Any])


def group_reward(function: Function) -> Function:
    """Mark a function that is called with the finished members of a group, a list of ``Trace``.

    It returns one result for each, in their order. An object that is called so may say
    ``compares_group = True`` in its class instead.
    """
    setattr(function, "compares_group", True)  # noqa: B010 - a function has no such attribute
    return function


def weighted(**parts: tuple[float, RewardOfTrace]) -> RewardOfTrace:
    """Make a reward of several: ``weighted(correct=(1.0, exact()), short=(0.1, length(400)))``.

    Each part becomes a reward of its name, multiplied by its weight; their sum counts. A part that
    gives several is named ``part.name``. A part that gives none is left out.

    Raises:
        ValueError: a part compares groups or is async; it is to be an entry of ``rewards`` itself.
    """
    for name, (_, reward) in parts.items():
        if getattr(reward, "compares_group", False) or inspect.iscoroutinefunction(reward):
            raise ValueError(
                f"weighted: {name} compares groups, as judges do, or is async; give it to "
                "--rewards by itself"
            )

    def score(trace: Trace) -> Scores:
        scores: dict[str, float] = {}
        for name, (weight, reward) in parts.items():
            result = reward(trace)
            if isinstance(result, Mapping):
                scores |= {f"{name}.{key}": weight * float(x) for key, x in result.items()}
            elif result is not None:
                scores[name] = weight * float(result)
        return scores or None

    return score


@dataclass(frozen=True, slots=True)
class ScoringContext:
    """Where rewards are computed.

    A function with a method ``connect(context)``, such as a judge, is told before the first score.
    What its method ``take_metrics()`` returns goes into the step's metrics.
    """

    store: Store
    run_id: str
    folder: Path
    """The run's folder."""
    note: Callable[[str], object]
    """Shows a sentence to the user."""
    models: Mapping[str, OtherModelSettings] = field(default_factory=dict[str, OtherModelSettings])
    """The [models] table of the run."""
    gateway: str | None = None
    """URL of the running gateway. ``runs rescore`` has one for functions whose class says
    ``asks_models = True``."""
    operator_key: str | None = None
    """The gateway's."""
    own_models: Sequence[str] = ()
    """Names that the run's own sampler answers to: of the base model and the adapters."""
    _noted: set[str] = field(default_factory=set[str])

    def note_once(self, kind: str, text: str) -> None:
        """Show the user what happens again and again only the first time."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded entry of ``rewards``."""

    name: str
    """Of its reward, unless it returns several by name."""
    call: Callable[[Any], Any]
    """Takes a ``Trace`` and returns ``Scores``, or a group's traces and returns one each."""

    @property
    def compares_group(self) -> bool:
        return getattr(self.call, "compares_group", False)

    @property
    def takes_cores(self) -> bool:
        """It computes on the CPU, so it is called while the trainer waits for its rewards."""
        return getattr(self.call, "takes_cores", False)

    @property
    def keys(self) -> str:
        """What the ``Reward.key`` of its rewards begins with."""
        return f"{SCORED}{self.name}:"


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """Import the function that a setting names: ``module:function`` or ``file.py:function``.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    try:
        parsed = parse_agent(spec)
        if parsed.kind == "command":
            raise AgentSpecError(spec, "it is a command")
        validate_agent(spec)
        function = load_target(spec, parsed)
    except AgentSpecError as error:
        raise ConfigError(
            f"{setting}: got {spec!r}: {error.problem}; give module:function or file.py:function"
        ) from error
    except Exception as error:  # of the user's module
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {spec!r} cannot be imported: {said}") from error
    if not callable(function):
        raise ConfigError(f"{setting}: {spec!r} is no function but {function!r:.80}")
    return function


def load_functions(entries: Sequence[str]) -> list[RewardFunction]:
    """Load what the setting ``rewards`` names.

    Raises:
        ConfigError: there is no such module, file or function, it cannot be imported or called, or
            two functions or two judges have the same name.
    """
    loaded = [_load(entry) for entry in entries]
    names = [one.name for one in loaded]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"rewards: two functions are named {twice[0]!r}, as their rewards are")
    judges = {judge for one in loaded for judge in getattr(one.call, "judges", ())}
    names = [judge.name for judge in judges]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"rewards: two judges are named {twice[0]!r}, as their costs and budgets are; give "
            'them name="..."'
        )
    return loaded


def _load(entry: str) -> RewardFunction:
    if entry.startswith("model:"):
        from agentrl.scoring.reward_model import RewardModel

        folder = Path(entry.removeprefix("model:"))
        return RewardFunction(folder.name, RewardModel(folder))
    target: Any = load_function(entry, "rewards")
    if inspect.isclass(target) or entry.startswith("agentrl.rewards:"):
        try:
            target = target()
        except Exception as error:  # of the user's class
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"rewards: {entry!r} cannot be made: {said}") from error
    return RewardFunction(re.split("[:.]", entry)[-1], target)
