"""What does not go together: checks over several settings, each naming the setting and the fix.

Each ``check_`` function raises ValueError.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from agentrl.config.errors import ConfigError
from agentrl.config.field_types import names_function
from agentrl.config.setting_names import flattened
from agentrl.config.settings.algorithm import AlgorithmSettings, table_of
from agentrl_trainer.distributed.options import check_shards
from agentrl_trainer.distributed.verl.options import check_options
from agentrl_trainer.names import check_name

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.config.commands import ModelCommand, OfflineConfig, TrainConfig
    from agentrl.config.settings.learning import LearningSettings
    from agentrl.config.settings.models import ModelSettings

_NOT_WITH = {
    "tinker": {
        "model.device": "the model runs on Tinker",
        "model.dtype": "the model runs on Tinker, in its own precision",
        "model.load_in_4bit": "the model runs on Tinker, in its own precision",
        "sampler.kind": "Tinker samples",
        "sampler.samplers": "Tinker samples",
        "sampler.temperature": "Tinker's log-probs are those at temperature 1",
        "learning.micro_batch_tokens": "Tinker packs its own batches",
        "learning.gradient_checkpointing": "Tinker manages its own memory",
        "learning.trainers": "Tinker trains on machines of its own",
        "learning.trainers_on": "Tinker trains on machines of its own",
        "learning.shard_base": "Tinker manages its own memory",
        "learning.alpha": "Tinker's alpha is 32",
        "learning.init_adapter": "Tinker starts from states that it keeps itself",
        "algorithm.kl.reference": "over Tinker the reference is the base model",
    },
    "verl": {
        "model.load_in_4bit": "its base model has 16 or 32 bits",
        "learning.trainers_on": "its workers are always actors of Ray",
        "learning.shard_base": "it spreads the base model by its own settings, verl.engine",
    },
}
"""Settings that must keep their defaults with a backend, and why."""


def _changed(config: BaseModel) -> list[str]:
    """Names of the settings that differ from their defaults."""
    return list(flattened(config.model_dump(exclude_defaults=True)))


def _check_effect(config: BaseModel, needs: dict[str, tuple[bool, str]]) -> None:
    """Refuse changed settings without effect: by setting or table, whether and why it has one."""
    changed = _changed(config)
    for name, (has_effect, what) in needs.items():
        for one in changed:
            if not has_effect and f"{one}.".startswith(f"{name}."):
                raise ValueError(f"{one}: has no effect without {what}")


def _refuse(*rules: tuple[bool, str]) -> None:
    """Raise the message of the first rule that is broken."""
    if said := next((said for broken, said in rules if broken), None):
        raise ValueError(said)


def correction_mode(config: TrainConfig) -> Literal["none", "truncate", "mask"]:
    """The correction in force: by default truncate where the sampler's policy was another one."""
    stale_trains = config.rollouts.max_staleness > 0 and config.rollouts.stale != "drop"
    differs = stale_trains or config.sampler.weights != "model"
    return config.algorithm.correction.mode or ("truncate" if differs else "none")


def length_normalization(
    algorithm: AlgorithmSettings,
) -> Literal["token", "sequence", "rollout", "constant"]:
    by_default = "constant" if algorithm.estimator == "dr_grpo" else "token"
    return algorithm.length_normalization or by_default


def compares_groups(config: TrainConfig) -> bool:
    """Tell whether the estimator learns from differences within groups alone."""
    estimator = config.algorithm.estimator
    if names_function(estimator):  # it is called with groups of ``min_group`` and more
        return config.rollouts.min_group > 1
    return estimator not in ("reinforce", "gae")


# ---- agentrl train


def check_train(config: TrainConfig) -> None:
    algorithm, rollouts, estimator = config.algorithm, config.rollouts, config.algorithm.estimator
    corrects = correction_mode(config) != "none"
    needs: dict[str, tuple[bool, str]] = {
        "algorithm.kl": (algorithm.kl.coef > 0, "algorithm.kl.coef above 0"),
        "algorithm.length_constant": (
            length_normalization(algorithm) == "constant", "length_normalization constant",
        ),
        "evaluation.stop_at": (
            config.evaluation.tasks is not None, "evaluation.tasks, whose accuracy it is",
        ),
        "evaluation.patience": (
            config.evaluation.tasks is not None, "evaluation.tasks, whose accuracy is to improve",
        ),
        "guards.max_cost": (bool(config.models), "other models: [models.NAME]"),
        "guards.roll_backs": (
            config.guards.on_collapse == "roll_back", 'guards.on_collapse = "roll_back"',
        ),
        "learning.init_optimizer": (
            config.learning.init_adapter is not None,
            "learning.init_adapter, whose optimizer it is",
        ),
        "rollouts.stale": (rollouts.max_staleness > 0, "a max_staleness above 0"),
        "tinker": (config.run.backend == "tinker", 'run.backend = "tinker"'),
        "verl": (config.run.backend == "verl", 'run.backend = "verl"'),
    }  # fmt: skip
    for key in ("level", "low", "high"):
        needs[f"algorithm.correction.{key}"] = corrects, "mode truncate or mask"
    if not getattr(algorithm.of_estimator, "normalize_std", True):
        table = f"algorithm.{table_of(estimator)}"
        for key in ("std_ddof", "std_epsilon"):
            needs[f"{table}.{key}"] = False, f"{table}.normalize_std"
    _check_effect(config, needs)
    compares = compares_groups(config)
    size, least = rollouts.group_size, max(2, rollouts.min_group)
    _refuse(
        (algorithm.off_policy != "train" and config.sampler.temperature == 0,
         f"sampler.temperature: 0 and algorithm.off_policy {algorithm.off_policy!r} would skip "
         "every answer, all of them greedy; raise the temperature, or set off_policy to train"),
        (compares and size < least,
         f"rollouts.group_size: {size} is too small for estimator {estimator!r}, which compares "
         f"the rollouts of a group; give at least {least}"),
        (not compares and rollouts.resample_zero_variance > 0,
         f"rollouts.resample_zero_variance: does not go with estimator {estimator!r}, which "
         "learns from groups with equal rewards too; leave it out"),
        (rollouts.stale == "correct" and not corrects,
         "algorithm.correction.mode: none contradicts rollouts.stale correct; leave the mode out, "
         "or set stale to drop or wait"),
        (config.guards.on_collapse == "roll_back" and config.evaluation.tasks is None,
         "guards.on_collapse: roll_back goes back to the step with the best held-out accuracy; "
         "give evaluation.tasks, or set it to stop"),
    )  # fmt: skip
    _check_gateways(config)
    if config.run.steps is not None:
        check_warmup(config.learning.warmup_steps, config.run.steps)
    if config.run.backend == "local":
        check_trainers(config.model, config.learning)
    else:
        _check_elsewhere(config)


def check_trainers(model: ModelSettings, learning: LearningSettings) -> None:
    """Check how several trainers share the base model."""
    _refuse(
        (learning.trainers == 1 and learning.shard_base,
         "learning.shard_base: has no effect without several learning.trainers"),
        (learning.trainers == 1 and learning.trainers_on == "ray",
         "learning.trainers: on Ray give 2 or more, such as ray:4, or set trainers_on to here"),
    )  # fmt: skip
    check_shards(shard=learning.shard_base, load_in_4bit=model.load_in_4bit)


def _check_gateways(config: TrainConfig) -> None:
    gateways, samplers = config.gateway.gateways, config.sampler.samplers
    urls, last = len(config.sampler.vllm.url), config.gateway.port + config.gateway_count - 1
    _refuse(
        (bool(urls) and samplers > 1,
         "sampler.samplers: these are started, and the servers of sampler.vllm.url run already; "
         "give one or the other"),
        (1 < gateways < max(samplers, urls),
         f"gateway.gateways: {gateways} are too few for {max(samplers, urls)} samplers, each of "
         "which has a gateway of its own; leave it out"),
        (1 < samplers < gateways and config.sampler.kind == "embedded",
         f"sampler.samplers: each of {gateways} gateways has an embedded sampler; leave it out"),
        (last > 65535, f"gateway.port: the last gateway's would be {last}; give a lower one"),
        (config.sampler.vllm.sleep and config.rollouts.max_staleness > 0,
         "sampler.vllm.sleep: with rollouts.max_staleness vLLM samples while the trainer updates; "
         "leave one of them out"),
    )  # fmt: skip


def check_warmup(warmup_steps: int, steps: int) -> None:
    """Raises ConfigError if the warmup is as long as the run."""
    if warmup_steps >= steps:
        raise ConfigError(
            f"learning.warmup_steps: {warmup_steps} leave none of {steps} steps the whole learning "
            f"rate; give at most {steps - 1}"
        )


def _check_elsewhere(config: TrainConfig) -> None:
    """Check what Tinker and verl do not have."""
    changed, backend = _changed(config), config.run.backend
    on_verl = backend == "verl"
    _refuse(
        *((name in changed, f'{name}: not with run.backend = "{backend}": {why}; leave it out')
          for name, why in _NOT_WITH[backend].items()),
        (config.algorithm.estimator == "gae",
         f'algorithm.estimator: gae needs a value function, which run.backend = "{backend}" does '
         "not have; choose another"),
        (backend == "tinker" and find_spec("tinker") is None,
         "run.backend: \"tinker\" needs the official SDK: pip install 'tinker>=0.38,<1'"),
        (on_verl and None in (find_spec("verl"), find_spec("ray")),
         'run.backend: "verl" needs an environment with verl and ray; docs/scale.md says how to '
         "make it"),
    )  # fmt: skip
    if on_verl:
        workers, verl = config.learning.trainers, config.verl
        check_options(workers, verl.nodes, config.model.dtype, verl.engine, verl.model)


def greedy_note(samples: int, temperature: float) -> str | None:
    """Return the warning for several greedy samples of a task; None where they can differ."""
    if samples == 1 or temperature > 0:
        return None
    return (
        f"at temperature 0 the {samples} samples of a task differ only by what the agent or its "
        "environment draws; pass@k needs a higher one"
    )


# ---- models


def check_models(config: ModelCommand) -> None:
    vllm = config.sampler.vllm
    runs = bool(vllm.url)
    _check_effect(
        config,
        {
            "sampler.vllm": (config.sampler.kind == "vllm", 'sampler.kind = "vllm"'),
            "sampler.weights": (
                config.sampler.kind == "embedded",
                'sampler.kind = "embedded"; for vLLM, sampler.vllm.args has its --quantization',
            ),
            "sampler.kv_tokens": (config.sampler.kind == "embedded", 'sampler.kind = "embedded"'),
            "sampler.vllm.key_env": (runs, "sampler.vllm.url; one started here needs no key"),
            "sampler.vllm.wait": (runs, "sampler.vllm.url; one started here may take its time"),
        },
    )
    _refuse(
        (re.search(r"--(api-key|hf-token)\b", vllm.args) is not None,
         "sampler.vllm.args: a key must not be in the file: the server that is started needs no "
         "--api-key, and reads a Hugging Face token from HF_TOKEN"),
        (runs and bool(vllm.python or vllm.args or vllm.sleep),
         "sampler.vllm.url: this server runs already; leave out python, args and sleep"),
        (config.model.load_in_4bit and config.sampler.kind == "vllm",
         "model.load_in_4bit: vLLM would sample from another model than the trainer's, because its "
         '4-bit format differs; use sampler.kind = "embedded"'),
    )  # fmt: skip
    for name, one in config.models.items():
        if name in (config.model.name, *config.trained):
            raise ValueError(f"models.{name}: this name is the trained model's; choose another")
        for other in one.fallbacks:
            if other not in config.models or other == name:
                said = f"models.{name}.fallbacks: {other!r} is no other model of the table"
                raise ValueError(said)
    owner: dict[str, str] = {}
    for name, one in config.adapters.items():
        try:
            check_name(name, dots=False)
        except ValueError as error:
            raise ValueError(f"adapters.{name}: {error}") from error
        if name == config.model.name:
            raise ValueError(f"adapters.{name}: this is the base model's name; choose another")
        for agent in one.agents or []:
            if owner.setdefault(agent, name) != name:
                raise ValueError(
                    f"adapters.{name}.agents: {agent!r} trains {owner[agent]} already; an agent "
                    "trains one adapter"
                )


# ---- agentrl sft, prefer, reward-model


def check_offline(config: OfflineConfig) -> None:
    data = config.data
    sources = [name for name in ("source", "from_run", "from_served") if hasattr(data, name)]
    if sum(getattr(data, name) is not None for name in sources) != 1:
        raise ValueError(f"data: give one of {', '.join(sources)}, such as --data FILE")
    of_run = data.from_run is not None, "data.from_run, whose rollouts it selects or judges"
    loss = getattr(getattr(config, "preference", None), "loss", None)
    _check_effect(config, {
        "data.best_of": of_run,
        "data.where": of_run,
        "data.by": of_run,
        "preference.gamma": (loss == "simpo", "preference.loss simpo"),
        "evaluation.patience": (data.held_out is not None, "data.held_out, whose loss it looks at"),
        "learning.init_optimizer": (
            config.learning.init_adapter is not None,
            "learning.init_adapter, whose optimizer it is",
        ),
    })  # fmt: skip
    _refuse(
        (config.kind == "reward-model" and config.learning.init_optimizer,
         "learning.init_optimizer: a reward model has a score head, for which no run that it can "
         "start from keeps an optimizer; leave it out"),
        (getattr(data, "train_on", None) == "tagged" and data.source is None,
         "data.train_on: tagged needs data.source, whose messages have tags"),
        (loss == "kto" and config.learning.batch_size < 2,
         "learning.batch_size: kto compares with answers to other prompts; give 2 or more"),
    )  # fmt: skip
    check_trainers(config.model, config.learning)
