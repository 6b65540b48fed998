"""Which tasks come next: by weights, by success so far, without those that are solved."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_records import rollout
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.training.queue.curriculum import Curriculum, tasks_in_order
from agentrl_trainer.own_function import FunctionError


def curriculum(
    tasks: int | list[Any] = 5, source: str = "tasks.jsonl", **settings: Any
) -> Curriculum:
    given = {f"curriculum.{name}": value for name, value in settings.items()}
    config = TrainConfig(**nested(agent="x:y", tasks=source, seed=3, **given))
    return Curriculum(config, [{}] * tasks if isinstance(tasks, int) else tasks)


def note(made: Curriculum, **won: list[bool]) -> None:
    """Add a group of each task, named t0, t1, ..., with what its rollouts won."""
    rollouts, rewards = [], {}
    for task, results in won.items():
        for at, result in enumerate(results):
            one = rollout(f"{task}{at}", group=task, task=f"run-train-{task[1:]}")
            rollouts.append(replace(one))
            rewards[one.id] = 1.0 if result else None
    made.note(rollouts, rewards)


def drawn(made: Curriculum, count: int, first: int = 0) -> Counter[int]:
    """Draw one by one."""
    found: Counter[int] = Counter()
    for _ in range(count):
        tasks, first = made.draw(first, 1)
        found.update(tasks)
    return found


def test_without_settings_each_epoch_has_every_task_once() -> None:
    made = curriculum()
    note(made, t0=[True])
    assert made.draw(0, 10) == (tasks_in_order(0, 10, 5, 3), 10)
    assert (made.state(), made.metrics()) == ({}, {})


def test_a_generators_tasks_come_in_its_order() -> None:
    assert curriculum(source="my.py:tasks").draw(3, 4) == ([3, 4, 0, 1], 7)
    of_a_dataset = curriculum(source="no_module_of_this_name:train")
    assert of_a_dataset.draw(0, 5)[0] == tasks_in_order(0, 5, 5, 3)


def test_solved_tasks_are_dropped_and_the_run_ends_without_others() -> None:
    made = curriculum(solved=0.75, window=2)
    note(made, t0=[True] * 4, t1=[True] * 4, t2=[False, True, True, True])
    assert made.metrics() == {"tasks/seen": 3, "tasks/solved": 0}  # one group is not enough
    note(made, t0=[True] * 4, t1=[False] * 4, t2=[True, True, True, False])
    order = tasks_in_order(0, 10, 5, 3)
    assert made.draw(0, 3)[0] == [task for task in order if task not in (0, 2)][:3]
    assert made.metrics()["tasks/solved"] == 2
    assert made.why_end() is None
    for _ in range(2):
        note(made, t1=[True], t3=[True], t4=[True])
    assert (ended := made.why_end()) is not None
    assert ended.sentence == "all 5 tasks are solved"
    note(made, t0=[False] * 4)  # a task that is not solved any more comes back
    assert made.draw(0, 3)[0] == [0, 0, 0]


def test_uncertain_tasks_come_most_often() -> None:
    made = curriculum(3, weights="uncertain", window=8)
    for _ in range(8):
        note(made, t0=[True] * 8, t1=[True, False] * 4)
    found = drawn(made, 300)
    # p (1 - p) with one win and one loss added: 0.015, 0.25, and 0.25 for the task not seen yet
    assert found[0] < 25
    assert 100 < found[1] < 200
    assert found[1] + found[2] > 275


def test_a_step_draws_no_task_twice_while_there_are_others(tmp_path: Path) -> None:
    file = tmp_path / "by_field.py"
    file.write_text("def weigh(task, rate):\n    return task['w']\n")
    tasks = [{"w": 1.0}, {"w": 100.0}, {"w": 0}, {"w": 1.0}]
    made = curriculum(tasks, weights=f"{file}:weigh")
    for first in range(20):
        tasks, after = made.draw(first, 3)
        assert (sorted(tasks), after) == ([0, 1, 3], first + 3)
    assert drawn(made, 200)[1] > 180
    assert Counter(made.draw(0, 6)[0]) == {0: 2, 1: 2, 3: 2}


def test_pools_have_their_shares_however_many_tasks_they_hold() -> None:
    made = curriculum(5, pools=[(0.3, 1), (1.0, 3)])
    for _ in range(4):
        note(made, t0=[False] * 4)  # alone in the pool of hard tasks
    found = drawn(made, 400)
    assert 60 < found[0] < 140
    assert all(45 < found[task] < 105 for task in range(1, 5))


def test_a_resumed_run_draws_what_it_would_have_drawn() -> None:
    settings: Any = {"weights": "uncertain", "solved": 1.0, "window": 1}
    made = curriculum(**settings)
    note(made, t0=[True, False], t1=[True, True])
    state = made.state()
    expected = made.draw(7, 20)
    note(made, t2=[True, True], t0=[False, False])  # and here it dies
    again = curriculum(**settings)
    again.restore(state)
    assert again.draw(7, 20) == expected
    assert made.draw(7, 20) != expected


def test_weights_may_be_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weigh.py"
    file.write_text("def weigh(task, rate):\n    return task['n'] * (rate >= 0.5)\n")
    tasks = [{"n": 0}, {"n": 1}, {"n": 1}]
    made = curriculum(tasks, weights=f"{file}:weigh")
    note(made, t1=[False])
    assert drawn(made, 20) == {2: 20}
    file.write_text("def weigh(task, rate):\n    return -1\n")
    monkeypatch.delitem(__import__("sys").modules, "weigh")
    with pytest.raises(FunctionError, match=r"curriculum.weights: weigh: it returned -1.0; a"):
        curriculum(tasks, weights=f"{file}:weigh")


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"curriculum.weights: .*no module 'no_such_module'"):
        curriculum(2, weights="no_such_module:weigh")


@pytest.mark.parametrize("pools", ["[[0.5, 1]]", "[[0.8, 1], [0.2, 1], [1, 1]]"])
def test_pools_cover_all_rates(pools: str) -> None:
    with pytest.raises(ValueError, match="the bounds must rise, and the last one must be 1"):
        curriculum(pools=pools)
