"""The study: Optuna's storage in the sweep's folder, to search with and to read results from."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.commands import SweepConfig
from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import flattened
from agentrl.config.settings.sweep import SweepSettings
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import shown
from agentrl.sweep.space import Space, trial_settings

if TYPE_CHECKING:
    from optuna import Study, pruners, samplers
    from optuna.trial import FrozenTrial

BEST = "best.toml"
_STUDY = "study.db"
_PACKAGES = "optuna scipy cmaes tomli-w"
_HALVING = 3
_ENOUGH = 5
"""Complete trials, from which importance can be told."""


def check_packages(how: SweepSettings) -> None:
    """Refuse to begin without the packages that a sweep needs.

    Raises:
        ConfigError: one is not installed; says what installs it.
    """
    if any(find_spec(one) is None for one in ("optuna", "tomli_w", "scipy", "cmaes")):
        raise ConfigError(f"sweep: it needs Optuna and its samplers: pip install {_PACKAGES}")
    if how.ray is not None and find_spec("ray") is None:
        raise ConfigError("sweep.ray: Ray is not installed: pip install ray")


def open_study(folder: RunFolder, config: SweepConfig, steps: int) -> Study:
    """Return the study of a folder, new or as it was left.

    Raises:
        ConfigError: it is a sweep over something else.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    how = config.sweep
    study = optuna.create_study(
        # A journal file would be damaged by a kill in the middle of a line.
        storage=f"sqlite:///{folder.root / _STUDY}",
        study_name=folder.name,
        direction=how.direction,
        pruner=_pruner(how.pruner, steps),
        load_if_exists=True,
    )
    # Another seed after each restart: the same one would choose the same values again.
    study.sampler = _sampler(config, config.run.seed + len(study.get_trials(deepcopy=False)))
    fixed = how.model_dump(mode="json", include={"metric", "direction", "seeds", "space"})
    fixed["settings"] = trial_settings(config, {})
    known, now = flattened(study.user_attrs.get("fixed", fixed)), flattened(fixed)
    if changed := [name for name in known | now if known.get(name) != now.get(name)]:
        had = known.get(changed[0], "no value")
        name = f"sweep.{changed[0]}".removeprefix("sweep.settings.")
        raise ConfigError(
            f"{name}: cannot change in the sweep {folder.name!r}, which has {had!r}. Give the new "
            "sweep another --name"
        )
    study.set_user_attr("fixed", fixed)
    whole_grid = math.prod(map(len, how.space.values())) if how.sampler == "grid" else math.inf
    study.set_user_attr("total", min(how.trials, whole_grid))
    return study


class SweepResults:
    """What a sweep has found so far.

    Trials have as attributes of the user: ``runs``, the names of those that were begun, one for
    each seed; ``spread``, the standard deviation over several seeds; ``reason``, why it failed.
    """

    def __init__(self, study: Study, folder: RunFolder) -> None:
        from optuna.importance import get_param_importances

        fixed: dict[str, Any] = study.user_attrs["fixed"]
        self.name, self.metric = folder.name, fixed["metric"]
        self.maximize: bool = fixed["direction"] == "maximize"
        self.total: int = study.user_attrs["total"]
        self.trials = study.get_trials(deepcopy=False)
        self.complete = [one for one in self.trials if one.state.name == "COMPLETE"]
        known = sorted(self.complete, key=lambda one: one.value or 0.0, reverse=self.maximize)
        self.ranked = known + [one for one in self.trials if one.state.name != "COMPLETE"]
        """The best complete one first, then the others by number."""
        self.best = known[0] if known else None
        self.best_command = f"agentrl train --config {shown(folder.root / BEST)}"
        self.space: Space = {}
        for trial in self.trials:
            self.space |= trial.distributions
        told = len(known) >= _ENOUGH and known[0].value != known[-1].value
        self.importance = get_param_importances(study) if told else {}
        """Share of each setting, the greatest first; empty before there are enough trials."""
        ended = sum(trial.state.is_finished() for trial in self.trials)
        left = "running" if folder.is_in_use() else "interrupted"
        self.state = "finished" if ended >= self.total else left
        self.version = f"{self.state}-{ended}-{sum(one.last_step or 0 for one in self.trials)}"
        """What differs once there is something new."""


def read_results(root: Path, name: str) -> SweepResults:
    """Read the sweep ``name`` below the folder ``root``.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    folder, file = RunFolder(root / name), root / name / _STUDY
    if name != os.path.basename(name) or not os.path.isfile(file):  # False of too long a name
        raise ConfigError(f"sweep: there is no sweep {name!r} in {root}")
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(f"sweep: {file} is read with Optuna: pip install {_PACKAGES}") from error
    starting = "the sweep is just starting; look again in a moment"
    try:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # To bring it up to date is the sweep's to do.
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{file}", skip_table_creation=True, skip_compatibility_check=True
        )
        try:
            study = optuna.load_study(study_name=None, storage=storage)
            if "total" in study.user_attrs:  # the last that ``open_study`` writes
                return SweepResults(study, folder)
        finally:
            storage.engine.dispose()
    except Exception as error:  # of Optuna and SQLAlchemy, which have many kinds
        why = f"{error}; perhaps {starting}" if folder.is_in_use() else error
        raise ConfigError(f"sweep: {file} cannot be read: {why}") from error
    why = starting if folder.is_in_use() else "it is a study of another program"
    raise ConfigError(f"sweep: {file} has no sweep yet: {why}")


def sweeps_in(root: Path) -> list[str]:
    """Return the names of the sweeps below a folder, the one changed last first."""
    files = sorted(root.glob(f"*/{_STUDY}"), key=lambda file: -file.stat().st_mtime)
    return [file.parent.name for file in files]


def text_of(value: Any) -> str:
    """Return the value of a setting or a metric as text."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def figure_of(trial: FrozenTrial) -> str:
    """Return the metric of a trial, with its spread."""
    spread = trial.user_attrs.get("spread")
    return text_of(trial.value) + (f" ± {spread:.2g}" if spread is not None else "")


def settings_of(trial: FrozenTrial) -> str:
    return "  ".join(f"{name}={text_of(value)}" for name, value in trial.params.items())


def _sampler(config: SweepConfig, seed: int) -> samplers.BaseSampler:
    from optuna import samplers

    if config.sweep.sampler == "grid":  # its order must be the same after a restart
        return samplers.GridSampler(config.sweep.space, seed=config.run.seed)
    kinds = {
        "cmaes": samplers.CmaEsSampler,
        "gp": samplers.GPSampler,
        "random": samplers.RandomSampler,
        "tpe": samplers.TPESampler,
    }
    return kinds[config.sweep.sampler](seed=seed)


def _pruner(name: str, steps: int) -> pruners.BasePruner:
    from optuna import pruners

    if name == "asha":
        first = max(1, math.ceil(steps / _HALVING**2))
        return pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=_HALVING)
    return pruners.MedianPruner() if name == "median" else pruners.NopPruner()
