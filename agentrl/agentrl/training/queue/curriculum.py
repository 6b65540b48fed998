"""Draw the tasks of a training: in shuffled epochs, or by weights and what was solved so far.

Every draw is a function of the seed, of how much was drawn, and of the recorded results, which the
checkpoint keeps. So a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from agentrl.config.commands import TrainConfig
from agentrl.config.field_types import is_generator
from agentrl.config.settings.curriculum import CurriculumSettings
from agentrl.history.index import task_index
from agentrl.runs.summary import Ending
from agentrl.scoring.functions import load_function
from agentrl_tracer.schemas import Json, Rollout
from agentrl_trainer.own_function import FunctionError, said_by

Weigh = Callable[[Json, float], float]


class Curriculum:
    """The tasks of a run, and how often the rollouts of each succeeded.

    Raises:
        ConfigError: ``weights`` cannot be loaded.
        FunctionError: it raises, or returns something else.
    """

    def __init__(self, config: TrainConfig, tasks: Sequence[Json]) -> None:
        self._how, self._tasks, self._seed = config.curriculum, tasks, config.run.seed
        self._success = config.evaluation.success_reward
        self._in_order = is_generator(str(config.agent.tasks))
        self._weigh = _weights(self._how.weights)
        self._weigh(tasks[0], 0.5)  # a function of the user is tried before the run starts
        self._used = self._how != CurriculumSettings()
        self._results: dict[int, list[list[int]]] = {}  # by task: won and all rollouts, by group

    def draw(self, first: int, count: int) -> tuple[list[int], int]:
        """Return the indices of ``count`` tasks, after ``first`` that were drawn before, and the
        new number of drawn tasks."""
        how, open_ = self._how, self._open()
        if how.weights or how.pools:
            return self._weighted(open_, first, count), first + count
        drawn, known = list[int](), set(open_)
        while missing := count - len(drawn):
            epochs = tasks_in_order(first, missing, len(self._tasks), self._seed)
            if self._in_order:
                epochs = [at % len(self._tasks) for at in range(first, first + missing)]
            drawn += [task for task in epochs if task in known]
            first += missing
        return drawn, first

    def _weighted(self, open_: Sequence[int], first: int, count: int) -> list[int]:
        """Draw without repetition while there are tasks, by the keys of Efraimidis and Spirakis
        2006, doi:10.1016/j.ipl.2005.11.003."""
        weights = self._weights(open_)
        rng = random.Random(f"{self._seed}/curriculum/{first}")
        drawn: list[int] = []
        while len(drawn) < count:
            keys = {at: math.log(1.0 - rng.random()) / weight for at, weight in weights.items()}
            drawn += sorted(keys, key=lambda at: -keys[at])[: count - len(drawn)]
        return drawn

    def _weights(self, open_: Sequence[int]) -> dict[int, float]:
        """Return the weights above 0; all equal where there is none."""
        rates = {at: self.rate(at) for at in open_}
        weights = {at: self._weigh(self._tasks[at], rates[at]) for at in open_}
        for index, (bound, share) in enumerate(self._how.pools):
            above = self._how.pools[index - 1][0] if index else -1.0
            pool = [at for at in open_ if above < rates[at] <= bound]
            total = math.fsum(weights[at] for at in pool) or 1.0
            weights |= {at: share * weights[at] / total for at in pool}
        return {at: w for at, w in weights.items() if w > 0} or dict.fromkeys(open_, 1.0)

    def rate(self, task: int) -> float:
        """Estimate a task's success rate over the window; one half without any result."""
        results = self._results.get(task, [])
        return (sum(won for won, _ in results) + 1) / (sum(n for _, n in results) + 2)

    def note(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> None:
        """Add the results of a step's groups, if a setting needs them. A rollout without a reward
        is no success."""
        groups: dict[tuple[int, str], list[bool]] = {}
        for one in rollouts if self._used else ():
            won = (reward := rewards.get(one.id)) is not None and reward >= self._success
            groups.setdefault((task_index(one), one.group_id), []).append(won)
        for (task, _), won in groups.items():
            results = [*self._results.get(task, []), [sum(won), len(won)]]
            self._results[task] = results[-self._how.window :]

    def _solved(self, task: int) -> bool:
        results = self._results.get(task, [])
        if self._how.solved is None or len(results) < self._how.window:
            return False
        return sum(won for won, _ in results) >= self._how.solved * sum(n for _, n in results)

    def _open(self) -> list[int]:
        """Return the tasks that are not solved; all of them where all are."""
        every = range(len(self._tasks))
        return [at for at in every if not self._solved(at)] or list(every)

    def why_end(self) -> Ending | None:
        """Tell that every task is solved; None while there are others."""
        if not all(map(self._solved, range(len(self._tasks)))):
            return None
        said = f"all {len(self._tasks)} tasks are solved"
        return Ending("curriculum.solved", said, evaluates=True)

    def metrics(self) -> dict[str, float]:
        solved = sum(map(self._solved, self._results))
        return {"tasks/seen": len(self._results), "tasks/solved": solved} if self._used else {}

    def state(self) -> Json:
        """Return the results by task; nothing where there are none."""
        known = {str(task): results for task, results in self._results.items()}
        return {"results": known} if known else {}

    def restore(self, state: Json) -> None:
        self._results = {int(task): results for task, results in state.get("results", {}).items()}


def tasks_in_order(first: int, count: int, tasks: int, seed: int) -> list[int]:
    """Return the indices of the run's tasks ``first`` to ``first + count``.

    Each epoch is a shuffle of its own. The result depends on the arguments alone, so a resumed run
    continues where it was.
    """
    return [_order(at // tasks, tasks, seed)[at % tasks] for at in range(first, first + count)]


@lru_cache(maxsize=2)
def _order(epoch: int, tasks: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(tasks), tasks)


def _weights(spec: str | None) -> Weigh:
    if spec is None:
        return lambda _, rate: 1.0
    if spec == "uncertain":
        return lambda _, rate: rate * (1.0 - rate)
    function = load_function(spec, "curriculum.weights")

    def weigh(task: Json, rate: float) -> float:
        with said_by(function, "curriculum.weights"):
            weight = float(function(task, rate))
            if not 0 <= weight < math.inf:
                raise FunctionError(f"it returned {weight}; a weight is a finite number from 0")
        return weight

    return weigh
