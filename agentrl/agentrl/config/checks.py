"""What does not go together: checks over several settings, each naming the setting and the fix."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, cast

from agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.config.commands import EvalConfig, ModelCommand, TrainConfig
    from agentrl.config.settings import AlgorithmSettings, SamplerSettings

LOSS_TABLES = ("ppo", "cispo", "dro", "gspo", "dppo")
ESTIMATOR_TABLES = ("grpo", "rloo", "reinforce_plus_plus", "turn", "gigpo", "gae")
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]+")


# ---- values in their short forms


def from_json(value: Any) -> Any:
    """Read a table that a flag gives as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def names_as_table(value: Any) -> Any:
    """Read ``["asker", "answerer"]`` or ``asker,answerer`` as two empty tables."""
    if isinstance(value, str) and value.strip()[:1] not in ("[", "{"):
        value = [name.strip() for name in value.split(",") if name.strip()]
    value = from_json(value)
    if isinstance(value, list):
        names = [str(name) for name in cast("list[object]", value)]
        if len(set(names)) < len(names):
            raise ValueError("a name is there twice")
        return {name: {} for name in names}
    return cast(Any, value)


def runners_on_ray(given: Any) -> Any:
    """Read ``runners = "ray:16"`` as 16 runners on Ray, and ``"ray"`` as the default number."""
    if isinstance(given, dict) and str(given.get("runners", "")).partition(":")[0] == "ray":
        count = str(given["runners"]).partition(":")[2]
        rest = {name: value for name, value in given.items() if name != "runners"}
        return {**rest, "runners_on": "ray"} | ({"runners": count} if count else {})
    return given


# ---- the algorithm's tables


def table_of_estimator(name: str) -> str:
    return name.replace("++", "_plus_plus")


def unchosen_tables(algorithm: AlgorithmSettings) -> set[str]:
    """Names of the tables of the losses and estimators that are not chosen."""
    chosen = {algorithm.loss, table_of_estimator(algorithm.estimator)}
    return {*LOSS_TABLES, *ESTIMATOR_TABLES} - chosen


def only_chosen_tables(given: Any, model: type[BaseModel]) -> Any:
    """Refuse the options of a loss or an estimator that is not chosen."""
    if not isinstance(given, dict):
        return given
    tables = cast("dict[str, Any]", given)
    for what, names in (("loss", LOSS_TABLES), ("estimator", ESTIMATOR_TABLES)):
        chosen = str(tables.get(what, model.model_fields[what].default))
        for name in names:
            if tables.get(name) and name != table_of_estimator(chosen):
                option = next(iter(tables[name]))
                value = name.replace("_plus_plus", "++")
                raise ValueError(
                    f"algorithm.{name}.{option}: has no effect with {what} {chosen!r}; set "
                    f'algorithm.{what} = "{value}", or leave it out'
                )
    return tables


def correction_mode(config: TrainConfig) -> Literal["none", "truncate", "mask"]:
    """The correction in force: by default truncate where stale answers may train."""
    stale_trains = config.rollouts.max_staleness > 0 and config.rollouts.stale != "drop"
    return config.algorithm.correction.mode or ("truncate" if stale_trains else "none")


def length_normalization(
    algorithm: AlgorithmSettings,
) -> Literal["token", "sequence", "rollout", "constant"]:
    by_default = "constant" if algorithm.estimator == "dr_grpo" else "token"
    return algorithm.length_normalization or by_default


def compares(algorithm: AlgorithmSettings) -> bool:
    """Whether the estimator compares the rollouts of a group."""
    return algorithm.estimator not in ("reinforce", "gae")


# ---- settings together


def check_train(config: TrainConfig) -> None:
    """Raises ValueError, naming the setting and the fix."""
    _check_algorithm(config)
    _check_groups(config)
    _check_staleness(config)
    if config.evaluation.stop_at is not None and config.evaluation.tasks is None:
        raise ValueError(
            "evaluation.stop_at: has no effect without evaluation.tasks, whose accuracy it is"
        )
    if config.run.steps is not None:
        check_warmup(config.learning.warmup_steps, config.run.steps)


def check_warmup(warmup_steps: int, steps: int) -> None:
    """Raises ConfigError if the warmup is as long as the run."""
    if warmup_steps >= steps:
        raise ConfigError(
            f"learning.warmup_steps: {warmup_steps} leave none of {steps} steps the whole learning "
            f"rate; give at most {steps - 1}"
        )


def _check_algorithm(config: TrainConfig) -> None:
    algorithm = config.algorithm
    if algorithm.loss == "ppo":
        dual, high = algorithm.ppo.dual_clip_threshold, algorithm.ppo.clip_high_threshold
        if dual is not None and dual <= high:
            raise ValueError(
                f"algorithm.ppo.dual_clip_threshold: {dual} must exceed clip_high_threshold "
                f"{high}; 3 is usual"
            )
    if not algorithm.kl.coef:
        _check_without_effect("algorithm.kl", algorithm.kl, "algorithm.kl.coef above 0")
    if correction_mode(config) == "none":
        _check_without_effect(
            "algorithm.correction", algorithm.correction, "mode truncate or mask", but=("mode",)
        )
    chosen = getattr(algorithm, table_of_estimator(algorithm.estimator), None)
    if chosen is not None and not getattr(chosen, "normalize_std", True):
        name = f"algorithm.{table_of_estimator(algorithm.estimator)}"
        others = tuple(set(type(chosen).model_fields) - {"std_ddof", "std_epsilon"})
        _check_without_effect(name, chosen, f"{name}.normalize_std", but=others)
    if algorithm.length_constant and length_normalization(algorithm) != "constant":
        raise ValueError(
            "algorithm.length_constant: has no effect; it needs length_normalization constant"
        )
    if algorithm.off_policy != "train" and config.sampler.temperature == 0:
        raise ValueError(
            f"sampler.temperature: 0 and algorithm.off_policy {algorithm.off_policy!r} would skip "
            "every answer, all of them greedy; raise the temperature, or set off_policy to train"
        )


def _check_without_effect(
    name: str, table: BaseModel, needs: str, but: tuple[str, ...] = ()
) -> None:
    for key in changed(table):
        if key not in but:
            raise ValueError(f"{name}.{key}: has no effect; it needs {needs}")


def changed(table: BaseModel) -> list[str]:
    """Names of the settings of a table that differ from their defaults."""
    fields = type(table).model_fields
    return [name for name in fields if getattr(table, name) != fields[name].get_default()]


def _check_groups(config: TrainConfig) -> None:
    rollouts, estimator = config.rollouts, config.algorithm.estimator
    least = max(2, rollouts.min_group)
    if compares(config.algorithm) and rollouts.group_size < least:
        raise ValueError(
            f"rollouts.group_size: {rollouts.group_size} is too small for estimator {estimator!r}, "
            f"which compares the rollouts of a group; give at least {least}"
        )
    if rollouts.resample_zero_variance and not compares(config.algorithm):
        raise ValueError(
            f"rollouts.resample_zero_variance: does not go with estimator {estimator!r}, which "
            "learns from groups with equal rewards too; leave it out"
        )


def _check_staleness(config: TrainConfig) -> None:
    rollouts = config.rollouts
    if rollouts.stale is not None and not rollouts.max_staleness:
        raise ValueError("rollouts.stale: has no effect; it needs a max_staleness above 0")
    if rollouts.stale == "correct" and correction_mode(config) == "none":
        raise ValueError(
            "algorithm.correction.mode: none contradicts rollouts.stale correct; leave the mode "
            "out, or set stale to drop or wait"
        )


def greedy_note(samples: int, temperature: float) -> str | None:
    """Return the warning for several greedy samples of a task; None where they can differ."""
    if samples == 1 or temperature > 0:
        return None
    return (
        f"at temperature 0 the {samples} samples of a task differ only by what the agent or its "
        "environment draws; pass@k needs a higher one"
    )


def check_vllm(sampler: SamplerSettings) -> None:
    """Raises ValueError, naming the setting and the fix."""
    vllm, given = sampler.vllm, changed(sampler.vllm)
    if given and sampler.kind != "vllm":
        raise ValueError(f'sampler.vllm.{given[0]}: has no effect without sampler.kind = "vllm"')
    if vllm.url and (vllm.python or vllm.args):
        raise ValueError("sampler.vllm.url: this server runs already; leave out python and args")
    if vllm.key_env and not vllm.url:
        raise ValueError(
            "sampler.vllm.key_env: is for sampler.vllm.url; a server started here needs no key"
        )
    if "wait" in given and not vllm.url:
        raise ValueError(
            "sampler.vllm.wait: is for sampler.vllm.url; a server started here may take its time"
        )


def check_models(config: ModelCommand) -> None:
    """Raises ValueError, naming the setting and the fix."""
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
        if not _ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"adapters.{name}: a name has letters, digits, - and _ only")
        if name == config.model.name:
            raise ValueError(f"adapters.{name}: this is the base model's name; choose another")
        for agent in one.agents or []:
            if agent in owner:
                raise ValueError(
                    f"adapters.{name}.agents: {agent!r} trains {owner[agent]} already; an agent "
                    "trains one adapter"
                )
            owner[agent] = name


def check_answered_by(config: EvalConfig) -> None:
    """Raises ValueError, naming the setting and the fix."""
    name = config.model.answered_by
    if name is None:
        return
    if config.model.adapter_path is not None:
        raise ValueError("model.answered_by: give it or model.adapter_path, not both")
    if name not in config.models:
        known = ", ".join(config.models) or "none"
        raise ValueError(
            f"model.answered_by: there is no [models.{name}] in the file (there: {known})"
        )
