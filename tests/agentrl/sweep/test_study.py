"""A study continues where it was left: the same values are not chosen again."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from sweeps import SmallSweep, opened, sweep_config

from agentrl.cli.sweep import sweep_command
from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.sweep.loop import Sweep
from agentrl.sweep.space import read_space
from agentrl.sweep.study import SweepResults, check_packages, read_results, sweeps_in

SPACE = {"learning.rank": [4, 8, 16], "learning.alpha": [8, 16]}


def ask(folder: Path, how: SweepConfig) -> tuple[Any, ...]:
    """Open the study of a folder again, for one trial."""
    study = opened(folder, how)
    trial = study.ask(read_space(how))
    with contextlib.suppress(RuntimeError):  # see Sweep
        study.tell(trial.number, trial.params["learning.rank"])
    return tuple(trial.params.values())


def test_a_grid_has_every_point_once_and_tells_which_setting_decides(tmp_path: Path) -> None:
    folder, how = RunFolder(tmp_path), sweep_config(SPACE, sampler="grid", trials=50)
    seen = {ask(tmp_path, how) for _ in range(4)}
    assert SweepResults(opened(tmp_path, how), folder).importance == {}
    seen |= {ask(tmp_path, how) for _ in range(2)}
    assert len(seen) == 6
    found = SweepResults(opened(tmp_path, how), folder)
    assert (found.total, found.state) == (6, "finished")
    assert max(found.importance, key=lambda name: found.importance[name]) == "learning.rank"
    assert found.best is not None
    assert found.best.params["learning.rank"] == 16


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "cmaes"])
def test_a_study_that_is_opened_again_chooses_other_values(tmp_path: Path, sampler: str) -> None:
    how = sweep_config({"learning.rank": {"low": 1, "high": 1000}}, sampler=sampler)
    ranks = [rank for [rank] in (ask(tmp_path, how) for _ in range(15))]
    assert len(set(ranks)) >= 10
    assert max(ranks) > 900  # the more the better, says ``ask``


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"metric": "reward/mean"}, "sweep.metric: "),
        ({"seeds": 2}, "sweep.seeds: "),
        ({"space": {"learning.rank": [4]}}, "sweep.space.learning.rank: "),
        ({"steps": 10}, "run.steps: .*has 9"),
    ],
)
def test_a_sweep_over_something_else_needs_another_name(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    opened(tmp_path, sweep_config(SPACE))
    opened(tmp_path, sweep_config(SPACE, trials=7, parallel=3))  # may change
    with pytest.raises(ConfigError, match=f"{said}.*another --name"):
        opened(tmp_path, sweep_config(**{"space": SPACE, **changed}))


def test_a_missing_package_and_a_damaged_study_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.sweep.study.find_spec", {"scipy": None}.get)
    with pytest.raises(ConfigError, match=r"sweep: .*pip install optuna"):
        check_packages(sweep_config(SPACE).sweep)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/study.db").write_text("no database")
    assert sweeps_in(tmp_path) == ["bad"]
    with pytest.raises(ConfigError, match=r"bad/study.db cannot be read"):
        read_results(tmp_path, "bad")


def test_a_sweep_that_is_just_starting_and_another_programs_study_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    optuna.create_study(storage=f"sqlite:///{tmp_path}/new/study.db", study_name="new")
    with pytest.raises(ConfigError, match="a study of another program"):
        read_results(tmp_path, "new")
    folder = RunFolder(tmp_path / "new")
    folder.lock()
    with pytest.raises(ConfigError, match="just starting; look again"):
        read_results(tmp_path, "new")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install optuna"):
        read_results(tmp_path, "new")


@pytest.mark.parametrize(
    ("metric", "kind", "said", "trials"),
    [
        ("loss", RuntimeError, "every trial fails.*mine-002 was never a finite", 3),
        ("median", ConfigError, "mine-000 has no 'median'; it has loss, step", 1),
    ],
)
def test_a_sweep_ends_where_trials_have_no_value_and_says_why(
    tmp_path: Path, metric: str, kind: type[Exception], said: str, trials: int
) -> None:
    for number in range(4):
        run = RunFolder(tmp_path / f"mine-{number:03d}")
        run.root.mkdir()
        run.summary.touch()  # it has ended
        run.metrics.write_text('{"step": 1, "loss": null}\n')
    how, folder = sweep_config(SPACE, metric=metric, trials=24), RunFolder(tmp_path / "mine")
    study = opened(folder.root, how)
    with pytest.raises(kind, match=said):
        Sweep(folder, how, read_space(how), study, steps=9).run()
    assert len(study.trials) == trials


@pytest.mark.parametrize("name", ["small-000", "small-012", "small-001-2"])
def test_other_runs_are_not_taken_for_its_own(tmp_path: Path, name: str) -> None:
    sweep = SmallSweep(tmp_path, metric="reward/mean", trials=13, space={"learning.rank": [4]})
    for one in ("small-1", "smaller-000", "small-013", "small-20261130-101010", name):
        (sweep.root / one).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"name: .*{name} is no run of this sweep"):
        sweep_command("--config", str(sweep.file), "--name", "small")
