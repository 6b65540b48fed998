"""The settings of a command by their dotted names, their old names, and the words for a name that
is none.

Files, flags and the environment are ``loading``'s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

NAME = "NAME"
"""Stands for a key of a table whose keys the user chooses, as in ``models.NAME.timeout``."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a command.

    Attributes:
        name: dotted, as in ``rollouts.group_size``.
        field: its type, default and description.
        short: its short flags without dashes.
    """

    name: str
    field: FieldInfo
    short: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """Its flags, the short ones last; none for a row of a table."""
        if NAME in self.name:
            return []
        return [flag_of(self.name), *(f"--{one}" for one in self.short)]

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "AGENTRL_" + self.name.replace(".", "__").upper()

    @property
    def default(self) -> str | None:
        """Its default as a file would say it; None where there is none, or it is chosen later."""
        default = self.field.get_default(call_default_factory=True)
        if default in (None, PydanticUndefined, {}, []):
            return None
        if isinstance(default, bool):
            return str(default).lower()
        return f"{default:g}" if isinstance(default, float) else str(default)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(command: type[BaseModel]) -> Iterator[Setting]:
    """Yield the settings of a command in their order; tables are walked into."""
    short: dict[str, tuple[str, ...]] = getattr(command, "short_flags", {})
    for name, field in _fields(command, ""):
        yield Setting(name, field, short.get(name, ()))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        if table := model_in(field.annotation):
            yield from _fields(table, f"{prefix}{key}.")
            continue
        yield prefix + key, field
        arguments = get_args(field.annotation)
        if len(arguments) == 2 and (row := model_in(arguments[1])):
            yield from _fields(row, f"{prefix}{key}.{NAME}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return a type that is the model of a table; None for other types."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def setting_at(
    command: type[BaseModel], location: Iterable[int | str]
) -> tuple[Setting | None, str]:
    """Find the setting that a validation error is about, and its name as the user wrote it.

    The setting is None where the location is a table or unknown.
    """
    known = {one.name: one for one in settings_of(command)}
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        name, row = ".".join(parts[:end]), ".".join([parts[0], NAME, *parts[2:end]])
        if found := known.get(name) or known.get(row):
            return found, name
    return None, ".".join(parts)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` with the known name nearest to ``name``; empty if none is."""
    names = list(known)
    if "." not in name:
        names = [*dict.fromkeys(one.partition(".")[0] for one in names), *names]
    last = name.rpartition(".")[2]
    same = [one for one in names if one.rpartition(".")[2] == last]  # the wrong table
    near = sorted(same, key=lambda one: (NAME in one, one.count("."))) or difflib.get_close_matches(
        name, names, n=1
    )
    if not near:
        ends = {one.rpartition(".")[2]: one for one in names}
        near = [ends[one] for one in difflib.get_close_matches(last, ends, n=1)]
    return f" Did you mean {near[0]}?" if near else ""


# ---- what a run has recorded, in ``config.json`` and in the store


def recorded(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a recorded setting by its dotted name; ``default`` if the run has none."""
    found: Any = config
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return default if found is None else found


_TABLES = ("models", "adapters", "speakers")  # of named rows


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; tables of named rows stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        whole = not isinstance(value, Mapping) or (not prefix and key in _TABLES)
        flat |= {prefix + key: value} if whole else flattened(value, f"{prefix}{key}.")
    return flat


# ---- the flat names that settings had before they were nested, and their new places

_SAME_NAME = {
    "agent": "tasks task python",
    "evaluation": "samples success_reward stop_at",
    "rollouts": "runners runners_on concurrency rollouts_per_process timeout lease on_error "
    "on_timeout on_missing_reward max_attempts max_calls_per_rollout max_tokens_per_rollout "
    "batch_size group_size min_group max_staleness stale resample_zero_variance",
    "learning": "learning_rate schedule warmup_steps max_grad_norm rank alpha epochs max_length "
    "micro_batch_tokens gradient_checkpointing",
    "algorithm": "loss estimator length_normalization length_constant truncated off_policy "
    "skip_agents",
    "algorithm.gae": "gae_lambda value_lr value_clip",
    "algorithm.gigpo": "step_weight",
    "algorithm.dppo": "divergence divergence_low divergence_high",
    "model": "device dtype load_in_4bit trust_remote_code adapter adapter_path answered_by "
    "base_url api_key_env",
    "sampler": "temperature max_tokens",
    "gateway": "host port operator_key accept_any_model forward_otlp max_concurrent max_queued "
    "receive_timeout receive_mib stall_timeout grace",
    "run": "name steps seed backend store trackers keep_checkpoints logs",
}
_SEVERAL_PLACES = {
    "normalize_std": "grpo rloo turn gigpo gae",
    "std_ddof": "grpo rloo turn gigpo gae reinforce_plus_plus",
    "std_epsilon": "grpo rloo turn gigpo gae reinforce_plus_plus",
    "discount": "turn gigpo gae",
    "clip_low_threshold": "ppo cispo gspo",
    "clip_high_threshold": "ppo cispo gspo",
    "dual_clip_threshold": "ppo",
    "beta": "dro",
}
_CHANGED = str.split("""
    agent agent.entrypoint  eval_tasks evaluation.tasks  eval_every evaluation.every
    eval_samples evaluation.samples  eval_temperature evaluation.temperature
    kl_coef algorithm.kl.coef  kl_estimator algorithm.kl.estimator
    kl_gradient algorithm.kl.gradient  kl_reference algorithm.kl.reference
    correction algorithm.correction.mode  correction_level algorithm.correction.level
    correction_low algorithm.correction.low  correction_high algorithm.correction.high
    model model.name  sampler sampler.kind  vllm_python sampler.vllm.python
    vllm_args sampler.vllm.args  vllm_url sampler.vllm.url  vllm_wait sampler.vllm.wait
    vllm_key_env sampler.vllm.key_env  tinker_base_url tinker.base_url
    tinker_tokenizer tinker.tokenizer  gateway gateway.url  gateway_host gateway.host
    gateway_port gateway.port  runs run.folder  run run.id
""")

RENAMED: dict[str, tuple[str, ...]] = {
    **{name: (f"{table}.{name}",) for table, names in _SAME_NAME.items() for name in names.split()},
    **{
        name: tuple(f"algorithm.{table}.{name}" for table in tables.split())
        for name, tables in _SEVERAL_PLACES.items()
    },
    **{old: (new,) for old, new in zip(_CHANGED[::2], _CHANGED[1::2], strict=True)},
}
"""By old name, the new ones: several where several losses or estimators have the option."""
