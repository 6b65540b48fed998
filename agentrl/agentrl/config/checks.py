"""What does not go together: checks over several settings, each naming the setting and the fix.

Each ``check_`` function raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.config.algorithm_options import AlgorithmSettings
    from agentrl.config.commands import EvalConfig, ModelCommand, TrainConfig
    from agentrl.config.settings import SamplerSettings

LOSSES = ("ppo", "cispo", "dro", "gspo", "dppo")
"""The losses that have a table of options."""
_ESTIMATORS = ("grpo", "rloo", "reinforce++", "turn", "gigpo", "gae")
_LOCAL_ONLY = {
    "model.device": "the model runs on Tinker",
    "model.dtype": "the model runs on Tinker, in its own precision",
    "model.load_in_4bit": "the model runs on Tinker, in its own precision",
    "sampler.kind": "Tinker samples",
    "sampler.temperature": "Tinker's log-probs are those at temperature 1",
    "learning.micro_batch_tokens": "Tinker packs its own batches",
    "learning.gradient_checkpointing": "Tinker manages its own memory",
    "learning.alpha": "Tinker's alpha is 32",
    "algorithm.kl.reference": "over Tinker the reference is the base model",
}
"""Settings that must keep their defaults over Tinker, and why."""


def changed(table: BaseModel) -> list[str]:
    """Names of the settings of a table that differ from their defaults."""
    fields = type(table).model_fields
    return [name for name in fields if getattr(table, name) != fields[name].get_default()]


def _check_unused(name: str, table: BaseModel, needs: str, but: Collection[str] = ()) -> None:
    """Refuse changed settings of a table that has no effect."""
    for key in changed(table):
        if key not in but:
            raise ValueError(f"{name}.{key}: has no effect; it needs {needs}")


# ---- the algorithm


def table_of(choice: str) -> str:
    """Name the table that holds the options of a loss or an estimator."""
    return choice.replace("++", "_plus_plus")


def unchosen_tables(algorithm: AlgorithmSettings) -> set[str]:
    """Names of the tables of the losses and estimators that are not chosen."""
    return {
        table_of(one) for one in {*LOSSES, *_ESTIMATORS} - {algorithm.loss, algorithm.estimator}
    }


def check_unchosen_tables(algorithm: AlgorithmSettings) -> None:
    for what, choices in (("loss", LOSSES), ("estimator", _ESTIMATORS)):
        chosen = getattr(algorithm, what)
        for value in choices:
            given = getattr(algorithm, table_of(value)).model_fields_set
            if given and value != chosen:
                raise ValueError(
                    f"algorithm.{table_of(value)}.{min(given)}: has no effect with {what} "
                    f'{chosen!r}; set algorithm.{what} = "{value}", or leave it out'
                )


def correction_mode(config: TrainConfig) -> Literal["none", "truncate", "mask"]:
    """The correction in force: by default truncate where stale answers may train."""
    stale_trains = config.rollouts.max_staleness > 0 and config.rollouts.stale != "drop"
    return config.algorithm.correction.mode or ("truncate" if stale_trains else "none")


def length_normalization(
    algorithm: AlgorithmSettings,
) -> Literal["token", "sequence", "rollout", "constant"]:
    by_default = "constant" if algorithm.estimator == "dr_grpo" else "token"
    return algorithm.length_normalization or by_default


def _check_algorithm(config: TrainConfig) -> None:
    algorithm = config.algorithm
    dual, high = algorithm.ppo.dual_clip_threshold, algorithm.ppo.clip_high_threshold
    if dual is not None and dual <= high:
        raise ValueError(
            f"algorithm.ppo.dual_clip_threshold: {dual} must exceed clip_high_threshold {high}; 3 "
            "is usual"
        )
    if not algorithm.kl.coef:
        _check_unused("algorithm.kl", algorithm.kl, "algorithm.kl.coef above 0")
    correction = algorithm.correction
    if correction_mode(config) == "none":
        _check_unused("algorithm.correction", correction, "mode truncate or mask", but=["mode"])
    chosen = algorithm.of_estimator
    if not getattr(chosen, "normalize_std", True):
        name = f"algorithm.{table_of(algorithm.estimator)}"
        others = type(chosen).model_fields.keys() - {"std_ddof", "std_epsilon"}
        _check_unused(name, chosen, f"{name}.normalize_std", but=others)
    if algorithm.length_constant and length_normalization(algorithm) != "constant":
        raise ValueError(
            "algorithm.length_constant: has no effect; it needs length_normalization constant"
        )
    if algorithm.off_policy != "train" and config.sampler.temperature == 0:
        raise ValueError(
            f"sampler.temperature: 0 and algorithm.off_policy {algorithm.off_policy!r} would skip "
            "every answer, all of them greedy; raise the temperature, or set off_policy to train"
        )


# ---- agentrl train


def check_train(config: TrainConfig) -> None:
    _check_algorithm(config)
    rollouts, estimator = config.rollouts, config.algorithm.estimator
    compares = estimator not in ("reinforce", "gae")  # the rollouts of a group
    least = max(2, rollouts.min_group)
    if compares and rollouts.group_size < least:
        raise ValueError(
            f"rollouts.group_size: {rollouts.group_size} is too small for estimator {estimator!r}, "
            f"which compares the rollouts of a group; give at least {least}"
        )
    if rollouts.resample_zero_variance and not compares:
        raise ValueError(
            f"rollouts.resample_zero_variance: does not go with estimator {estimator!r}, which "
            "learns from groups with equal rewards too; leave it out"
        )
    if rollouts.stale is not None and not rollouts.max_staleness:
        raise ValueError("rollouts.stale: has no effect; it needs a max_staleness above 0")
    if rollouts.stale == "correct" and correction_mode(config) == "none":
        raise ValueError(
            "algorithm.correction.mode: none contradicts rollouts.stale correct; leave the mode "
            "out, or set stale to drop or wait"
        )
    if config.evaluation.stop_at is not None and config.evaluation.tasks is None:
        raise ValueError(
            "evaluation.stop_at: has no effect without evaluation.tasks, whose accuracy it is"
        )
    if config.run.steps is not None:
        check_warmup(config.learning.warmup_steps, config.run.steps)
    if config.run.backend == "tinker":
        _check_tinker(config)
    elif given := changed(config.tinker):
        raise ValueError(f'tinker.{given[0]}: has no effect without run.backend = "tinker"')


def check_warmup(warmup_steps: int, steps: int) -> None:
    """Raises ConfigError if the warmup is as long as the run."""
    if warmup_steps >= steps:
        raise ConfigError(
            f"learning.warmup_steps: {warmup_steps} leave none of {steps} steps the whole learning "
            f"rate; give at most {steps - 1}"
        )


def _check_tinker(config: TrainConfig) -> None:
    for name, why in _LOCAL_ONLY.items():
        *tables, key = name.split(".")
        if key in changed(reduce(getattr, tables, config)):
            raise ValueError(f'{name}: not with run.backend = "tinker": {why}; leave it out')
    if config.algorithm.estimator == "gae":
        raise ValueError(
            'algorithm.estimator: gae needs a value function, which run.backend = "tinker" does '
            "not have; choose another"
        )
    if find_spec("tinker") is None:
        raise ValueError(
            "run.backend: \"tinker\" needs the official SDK: pip install 'tinker>=0.38,<1'"
        )


def greedy_note(samples: int, temperature: float) -> str | None:
    """Return the warning for several greedy samples of a task; None where they can differ."""
    if samples == 1 or temperature > 0:
        return None
    return (
        f"at temperature 0 the {samples} samples of a task differ only by what the agent or its "
        "environment draws; pass@k needs a higher one"
    )


# ---- models and samplers


def check_vllm(sampler: SamplerSettings) -> None:
    vllm, given = sampler.vllm, changed(sampler.vllm)
    if given and sampler.kind != "vllm":
        raise ValueError(f'sampler.vllm.{given[0]}: has no effect without sampler.kind = "vllm"')
    if vllm.url and (vllm.python or vllm.args):
        raise ValueError("sampler.vllm.url: this server runs already; leave out python and args")
    for name, has in (("key_env", "needs no key"), ("wait", "may take its time")):
        if name in given and not vllm.url:
            raise ValueError(
                f"sampler.vllm.{name}: is for sampler.vllm.url; a server started here {has}"
            )


def check_models(config: ModelCommand) -> None:
    if config.model.load_in_4bit and config.sampler.kind == "vllm":
        raise ValueError(
            "model.load_in_4bit: vLLM would sample from another model than the trainer's, because "
            'its 4-bit format differs; use sampler.kind = "embedded"'
        )
    for name, one in config.models.items():
        if name in (config.model.name, *config.trained):
            raise ValueError(f"models.{name}: this name is the trained model's; choose another")
        for other in one.fallbacks:
            if other not in config.models or other == name:
                raise ValueError(
                    f"models.{name}.fallbacks: {other!r} is no other model of the table"
                )
    owner: dict[str, str] = {}
    for name, one in config.adapters.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"adapters.{name}: a name has letters, digits, - and _ only")
        if name == config.model.name:
            raise ValueError(f"adapters.{name}: this is the base model's name; choose another")
        for agent in one.agents or []:
            if owner.setdefault(agent, name) != name:
                raise ValueError(
                    f"adapters.{name}.agents: {agent!r} trains {owner[agent]} already; an agent "
                    "trains one adapter"
                )


def check_answered_by(config: EvalConfig) -> None:
    name = config.model.answered_by
    if name is not None and config.model.adapter_path is not None:
        raise ValueError("model.answered_by: give it or model.adapter_path, not both")
    if name is not None and name not in config.models:
        known = ", ".join(config.models) or "none"
        raise ValueError(
            f"model.answered_by: there is no [models.{name}] in the file (there: {known})"
        )
