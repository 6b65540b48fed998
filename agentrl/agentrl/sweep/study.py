"""The study: Optuna's storage in the sweep's folder, its sampler and its pruner."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.sweep.space import Dimension, shared_settings

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

_NEEDS = {"gp": "scipy", "cmaes": "cmaes"}
_EXTRA = "agentrl-middleware[sweep]"
_HALVING = 3
_ENOUGH = 5  # complete trials
_FIXED = ("space", "metric", "direction", "seeds", "settings")


def check_packages(config: SweepConfig) -> None:
    """Refuse to begin without the packages that a sweep needs.

    Raises:
        ConfigError: one is not installed; says what installs it.
    """
    needed = {"optuna": _EXTRA, "tomli_w": _EXTRA}
    if own := _NEEDS.get(config.sweep.sampler):
        needed[own] = own
    for package, install in needed.items():
        try:
            importlib.import_module(package)
        except ImportError as error:
            what = "sweep.sampler" if package == install else "agentrl sweep"
            raise ConfigError(f"{what} needs {package}: pip install '{install}'") from error


def open_study(
    folder: RunFolder, config: SweepConfig, space: Sequence[Dimension], steps: int
) -> Study:
    """Return the study of a folder, new or as it was left.

    Raises:
        ConfigError: it is a sweep over something else.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    how = config.sweep
    study = optuna.create_study(
        # A journal file would be damaged by a kill in the middle of a line.
        storage=f"sqlite:///{folder.root / 'study.db'}",
        study_name=folder.name,
        direction=how.direction,
        pruner=_pruner(how.pruner, steps),
        load_if_exists=True,
    )
    given = {
        "space": [one.recorded() for one in space],
        "settings": shared_settings(config),
        **how.model_dump(include={"metric", "direction", "seeds"}),
    }
    for name in _FIXED:
        known = study.user_attrs.get(name, given[name])
        if known != given[name]:
            which = "the settings of its trials" if name == "settings" else f"sweep.{name}"
            raise ConfigError(
                f"name: {folder.name!r} is a sweep with other values of {which}, which cannot "
                f"change: it had {known!r}. Give the new sweep another --name"
            )
        study.set_user_attr(name, given[name])
    # Another seed after each restart: the same one would choose the same values again.
    seed = config.run.seed + len(study.get_trials(deepcopy=False))
    study.sampler = _sampler(how.sampler, space, seed, config.run.seed)
    return study


def distribution(one: Dimension) -> BaseDistribution:
    from optuna import distributions

    if one.choices:
        return distributions.CategoricalDistribution(one.choices)
    if one.whole:
        step = int(one.step or 1)
        return distributions.IntDistribution(int(one.low), int(one.high), one.log, step)
    return distributions.FloatDistribution(one.low, one.high, one.log, one.step)


def trials_of(config: SweepConfig, space: Sequence[Dimension]) -> int:
    """Return how many trials the sweep has: a grid has no more than its points."""
    if config.sweep.sampler != "grid":
        return config.sweep.trials
    return min(config.sweep.trials, math.prod(len(one.values()) for one in space))


def tell(study: Study, number: int, **what: Any) -> None:
    """Tell the study how a trial ended."""
    with contextlib.suppress(RuntimeError):  # the last point of a grid stops Optuna's own loop
        study.tell(number, **what)


def importances(study: Study) -> dict[str, float]:
    """Return how much each setting decides to be among the best tenth; they add up to 1.

    They are empty before there are enough complete trials to tell.
    """
    import optuna

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(complete) < _ENOUGH or len({trial.value for trial in complete}) < 2:
        return {}
    return optuna.importance.get_param_importances(study)


def _sampler(name: str, space: Sequence[Dimension], seed: int, order: int) -> BaseSampler:
    from optuna import samplers

    if name == "grid":  # its order must be the same after a restart
        return samplers.GridSampler({one.name: one.values() for one in space}, seed=order)
    if name in _NEEDS:
        kind = samplers.GPSampler if name == "gp" else samplers.CmaEsSampler
        return kind(seed=seed, warn_independent_sampling=False)
    return (samplers.RandomSampler if name == "random" else samplers.TPESampler)(seed=seed)


def _pruner(name: str, steps: int) -> BasePruner:
    from optuna import pruners

    if name == "asha":
        first = max(1, math.ceil(steps / _HALVING**2))
        return pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=_HALVING)
    return pruners.MedianPruner() if name == "median" else pruners.NopPruner()
