"""A study continues where it was left: the same values are not chosen again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.sweep.space import read_space
from agentrl.sweep.study import (
    check_packages,
    distribution,
    importances,
    open_study,
    tell,
    trials_of,
)

SPACE = {"learning.rank": [4, 8, 16], "learning.alpha": [8, 16]}


def config(space: dict[str, Any] = SPACE, steps: int = 9, **sweep: Any) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
            "run": {"steps": steps},
            "sweep": {"space": space, **sweep},
        }
    )


def opened(folder: Path, how: SweepConfig) -> Any:
    return open_study(RunFolder(folder), how, read_space(how), how.run.steps or 0)


def ask(study: Any, how: SweepConfig) -> tuple[Any, ...]:
    trial = study.ask({one.name: distribution(one) for one in read_space(how)})
    tell(study, trial.number, values=trial.params["learning.rank"])
    return tuple(trial.params.values())


def test_a_grid_has_every_point_once_though_it_is_opened_again_for_each(tmp_path: Path) -> None:
    how = config(sampler="grid", trials=50)
    assert trials_of(how, read_space(how)) == 6
    assert len({ask(opened(tmp_path, how), how) for _ in range(6)}) == 6


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_study_that_is_opened_again_chooses_other_values(tmp_path: Path, sampler: str) -> None:
    how = config({"learning.rank": {"low": 1, "high": 1000}}, sampler=sampler)
    assert len({ask(opened(tmp_path, how), how) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"metric": "reward/mean"}, "sweep.metric"),
        ({"seeds": 2}, "sweep.seeds"),
        ({"space": {"learning.rank": [4]}}, "sweep.space"),
        ({"steps": 10}, "the settings of its trials"),
    ],
)
def test_a_sweep_over_something_else_needs_another_name(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    opened(tmp_path, config())
    opened(tmp_path, config(trials=7, parallel=3))  # may change
    with pytest.raises(ConfigError, match=f"{said}.*another --name"):
        opened(tmp_path, config(**changed))


def test_the_setting_that_decides_is_the_important_one_once_there_are_enough(
    tmp_path: Path,
) -> None:
    how = config(sampler="grid", trials=6)
    study = opened(tmp_path, how)
    for _ in range(4):
        ask(study, how)
    assert importances(study) == {}
    for _ in range(2):
        ask(study, how)
    assert max(importances(study)) == "learning.rank"


def test_asha_keeps_a_third_at_each_rung(tmp_path: Path) -> None:
    how = config(pruner="asha", sampler="random")
    study = opened(tmp_path, how)
    pruned = []
    for value in (9, 1, 2, 8, 3, 10):
        trial = study.ask({one.name: distribution(one) for one in read_space(how)})
        trial.report(value, 1)
        pruned.append(trial.should_prune())
        state = TrialState.PRUNED if pruned[-1] else TrialState.COMPLETE
        tell(study, trial.number, state=state, values=None if pruned[-1] else value)
    assert pruned == [False, True, True, True, True, False]


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    with pytest.raises(ConfigError, match="needs cmaes: pip install 'cmaes'"):
        check_packages(config(sampler="cmaes"))
