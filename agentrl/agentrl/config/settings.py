"""The configuration: one typed model for the file, the flags and the environment.

Every field is a flag (``--group-size``), a key in a TOML or YAML file (``group_size``) and an
environment variable (``AGENTRL_GROUP_SIZE``). Flags win over the environment, that over the file.
Relative paths are relative to the working directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from cyclopts import Group, Parameter
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.secrets import variables_in, written_out
from agentrl.config.tinker import check_backend

_AGENT = Group("Agent and tasks", sort_key=1)
_ROLLOUTS = Group("Rollouts", sort_key=2)
_LEARNING = Group("Learning", sort_key=3)
_MODEL = Group("Model", sort_key=4)
_RUN = Group("Run", sort_key=5)

AGENT_HELP = "What to run: module:function, file.py:function, or a command line."

Policy = Literal["retry", "drop"] | float


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class OtherModelConfig(_Config):
    """A model that somebody else serves: an answerer, a judge, a search model."""

    model: str = Field(
        description="LiteLLM's name of the model, for instance openai/gpt-4o-mini.", min_length=1
    )
    api_base: str | None = Field(
        None, description="URL of the provider; by default LiteLLM knows it."
    )
    api_key_env: str | None = Field(
        None,
        description="NAME of the environment variable that holds the key; never the key itself.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    timeout: float = Field(120, gt=0, description="Seconds after which one try is given up.")
    num_retries: int = Field(2, ge=0, description="Further tries after a failure.")
    fallbacks: list[str] = Field(
        default_factory=list[str], description="Other models of this table to ask when it fails."
    )
    params: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="More of LiteLLM's parameters; no keys: os.environ/NAME stands for one that is "
        'in the environment, as in extra_headers = {authorization = "Bearer os.environ/NAME"}.',
    )

    @field_validator("api_key_env")
    @classmethod
    def _key_is_there(cls, name: str | None) -> str | None:
        if name is not None and not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set")
        return name

    @field_validator("params")
    @classmethod
    def _no_key_in_the_file(cls, params: dict[str, Any]) -> dict[str, Any]:
        for name in params:
            if name in OtherModelConfig.model_fields:
                raise ValueError(f"{name} belongs beside params, not into it")
            if name == "api_key":
                raise ValueError("a key must not be in the file: name its variable in api_key_env")
        if where := written_out(params):
            raise ValueError(
                f"{where} is a secret, which must not be in the file: write os.environ/NAME in its "
                "place, where NAME is the environment variable that holds it"
            )
        for name in variables_in(params):
            if not os.environ.get(name):
                raise ValueError(f"the environment variable {name} is not set")
        return params


class AdapterConfig(_Config):
    """One of several adapters that train together."""

    agents: list[str] | None = Field(
        None,
        description="Agents (roles) that train it: their calls are answered by it where they ask "
        "for no other name, and nobody else's train it. By default every call that it answers.",
        min_length=1,
    )
    rewards: list[str] | None = Field(
        None,
        description="Names of the rewards that count for it, summed; by default all of them.",
        min_length=1,
    )


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _names_as_table(value: Any) -> Any:
    """``["asker", "answerer"]`` and ``asker,answerer`` say the same as two empty tables."""
    if isinstance(value, str) and value.strip()[:1] not in ("[", "{"):
        value = [name.strip() for name in value.split(",") if name.strip()]
    value = _from_json(value)
    if isinstance(value, list):
        names = [str(name) for name in cast("list[object]", value)]
        if len(set(names)) < len(names):
            raise ValueError("a name is there twice")
        return {name: {} for name in names}
    return cast(Any, value)


def _from_json(value: Any) -> Any:
    """Cyclopts would take nested tables apart by dots and lose their lists: they come as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def tables_as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings as Cyclopts takes them."""
    return {
        name: json.dumps(value) if name in ("models", "adapters", "task") else value
        for name, value in settings.items()
    }


@Parameter(name="*")
class ModelConfig(_Config):
    """Which base model, and where it runs."""

    model: Annotated[str, Parameter(group=_MODEL)] = Field(
        "agentrl-tiny",
        description="Base model: agentrl-tiny (built in), a folder, or a Hugging Face name.",
        min_length=1,
    )
    device: Annotated[str, Parameter(group=_MODEL)] = Field(
        "auto", description="Torch device of sampler and trainer: auto, cpu, cuda, cuda:1, ..."
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Parameter(group=_MODEL)] = (
        Field("auto", description="Precision of the base model; the adapter trains in float32.")
    )
    load_in_4bit: Annotated[bool, Parameter(group=_MODEL)] = Field(
        False,
        description="The base model's linear layers in 4 bits (NF4, as in QLoRA), by bitsandbytes; "
        "a quarter of bfloat16's memory.",
    )
    trust_remote_code: Annotated[bool, Parameter(group=_MODEL)] = Field(
        False,
        description="Run the Python code that comes with the model, where transformers has none "
        "for it. It could do anything to this machine.",
    )
    sampler: Annotated[Literal["embedded", "vllm"], Parameter(group=_MODEL)] = Field(
        "embedded",
        description="What samples: the embedded engine, or a vLLM server.",
    )
    vllm_python: Annotated[Path | None, Parameter(group=_MODEL)] = Field(
        None,
        description="Interpreter that has vLLM, for the server that is started; by default this "
        "one. An environment of its own is best, because vLLM pins torch.",
    )
    vllm_args: Annotated[str, Parameter(group=_MODEL, allow_leading_hyphen=True)] = Field(
        "",
        description="More arguments for the server that is started, for instance "
        "'--gpu-memory-utilization 0.4' to leave the trainer room on a shared GPU.",
    )
    vllm_url: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None,
        description="URL of a vLLM server that runs already, with --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; it must see the run folder under the same path.",
        pattern=r"^(https?://|unix:/).+",
    )
    vllm_wait: Annotated[float, Parameter(group=_MODEL)] = Field(
        60,
        ge=0,
        description="Seconds to wait for the server at vllm_url at the start.",
    )
    vllm_key_env: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None,
        description="NAME of the environment variable that holds that server's API key.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    adapter: Annotated[str, Parameter(group=_MODEL)] = Field(
        "policy",
        description="Name of the adapter: the model that the agent asks for.",
        pattern=r"^[A-Za-z0-9_-]+$",
    )
    adapters: Annotated[
        dict[str, AdapterConfig],
        Parameter(group=_MODEL, accepts_keys=False, n_tokens=1),
        BeforeValidator(_names_as_table),
    ] = Field(
        default_factory=dict[str, AdapterConfig],
        description="Several adapters in place of one, trained together: NAME,NAME or, for who "
        "trains which on what, [adapters.NAME] in the file. An agent asks for one by its name.",
    )
    max_concurrent: Annotated[int, Parameter(group=_RUN)] = Field(
        1024,
        ge=1,
        description="Requests the gateway answers at once, those to other models included; others "
        "get 429 and wait.",
    )
    max_queued: Annotated[int, Parameter(group=_RUN)] = Field(
        1024, ge=1, description="Answers that wait to be sampled; while more do, others get 429."
    )
    receive_timeout: Annotated[float, Parameter(group=_RUN)] = Field(
        60, gt=0, description="Seconds a client has to send a whole request to the gateway."
    )
    receive_mib: Annotated[int, Parameter(group=_RUN)] = Field(
        128,
        ge=32,
        description="MiB of requests that may be on their way to the gateway at once; large ones "
        "beyond it get 429 and wait.",
    )
    stall_timeout: Annotated[float, Parameter(group=_RUN)] = Field(
        60, gt=0, description="Seconds a client may leave an answer unread before it is dropped."
    )
    grace: Annotated[int, Parameter(group=_RUN)] = Field(
        5, ge=0, description="Seconds for answers under way when the gateway is told to stop."
    )
    accept_any_model: Annotated[bool, Parameter(group=_MODEL)] = Field(
        True,
        description="Whether the adapter answers model names that nobody has defined, as agents "
        "write theirs down (gpt-4o-mini); without it they get 404.",
    )
    forward_otlp: Annotated[str | None, Parameter(group=_RUN)] = Field(
        None,
        description="Base URL of an OTLP backend (Jaeger, Phoenix, Langfuse) that gets every span, "
        "call and reward too. Headers: AGENTRL_FORWARD_OTLP_HEADERS=name=value,...",
        pattern=r"^https?://\S+$",
    )
    models: Annotated[
        dict[str, OtherModelConfig],
        Parameter(group=_MODEL, accepts_keys=False, n_tokens=1),
        BeforeValidator(_from_json),
    ] = Field(
        default_factory=dict[str, OtherModelConfig],
        description="Other models by the name that the agent asks for, recorded and never trained: "
        "[models.NAME] in the file, JSON in a flag.",
    )

    @field_validator("vllm_key_env")
    @classmethod
    def _vllm_key_is_there(cls, name: str | None) -> str | None:
        if name is not None and not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set")
        return name

    @model_validator(mode="after")
    def _vllm_is_meant(self) -> Self:
        ours = {n: f for n, f in type(self).model_fields.items() if n.startswith("vllm_")}
        given = [n for n, field in ours.items() if getattr(self, n) != field.default]
        if given and self.sampler != "vllm":
            raise ValueError(f'{given[0]}: has no effect without sampler = "vllm"')
        if self.vllm_url and (self.vllm_python or self.vllm_args):
            raise ValueError("vllm_url: this server runs already; drop vllm_python and vllm_args")
        if self.vllm_key_env and not self.vllm_url:
            raise ValueError("vllm_key_env: is for vllm_url; the server we start needs no key")
        if "vllm_wait" in given and not self.vllm_url:
            raise ValueError("vllm_wait: is for vllm_url; the server we start may take its time")
        if self.load_in_4bit and self.sampler == "vllm":
            raise ValueError(
                "load_in_4bit: vLLM would sample from another model than the trainer's, for its 4 "
                'bits are not the same; use sampler = "embedded"'
            )
        return self

    def gateway_limits(self) -> dict[str, Any]:
        """These settings as GatewaySettings calls them."""
        names = (
            "max_concurrent", "max_queued", "receive_timeout", "receive_mib", "stall_timeout",
            "grace", "accept_any_model", "forward_otlp",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _models_fit_together(self) -> Self:
        for name, one in self.models.items():
            if name in (self.model, *self.trained):
                raise ValueError(f"models.{name}: this name is the trained model's; choose another")
            for other in one.fallbacks:
                if other not in self.models or other == name:
                    raise ValueError(
                        f"models.{name}.fallbacks: {other!r} is no other model of the table"
                    )
        return self

    @model_validator(mode="after")
    def _adapters_are_apart(self) -> Self:
        owner: dict[str, str] = {}
        for name, one in self.adapters.items():
            if not _ADAPTER_NAME.fullmatch(name):
                raise ValueError(f"adapters.{name}: a name has letters, digits, - and _ only")
            if name == self.model:
                raise ValueError(f"adapters.{name}: this is the base model's name; choose another")
            for agent in one.agents or []:
                if agent in owner:
                    raise ValueError(
                        f"adapters.{name}.agents: {agent!r} trains {owner[agent]} already; one "
                        "agent trains one adapter"
                    )
                owner[agent] = name
        return self

    @property
    def trained(self) -> dict[str, AdapterConfig]:
        """The adapters, by the names that agents ask for."""
        return self.adapters or {self.adapter: AdapterConfig()}  # pyright: ignore[reportCallIssue]

    @property
    def adapter_of_agent(self) -> dict[str, str]:
        """By role, where an adapter names its agents."""
        return {agent: name for name, one in self.trained.items() for agent in one.agents or []}

    @property
    def sole_adapter(self) -> str | None:
        """The one that answers whatever name an agent asks for; None when there are several."""
        return next(iter(self.trained)) if len(self.trained) == 1 else None


@Parameter(name="*")
class RolloutConfig(_Config):
    """How the agent is executed."""

    @model_validator(mode="before")
    @classmethod
    def _runners_may_say_where(cls, given: Any) -> Any:
        """``runners = "ray:16"`` is short for 16 runners on Ray, and ``"ray"`` for the usual 8."""
        if isinstance(given, dict) and str(given.get("runners", "")).partition(":")[0] == "ray":
            count = str(given["runners"]).partition(":")[2]
            rest = {name: value for name, value in given.items() if name != "runners"}
            return {**rest, "runners_on": "ray"} | ({"runners": count} if count else {})
        return given

    runners: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        8, ge=1, le=1024, description="Worker processes that run the agent."
    )
    runners_on: Annotated[Literal["here", "ray"], Parameter(group=_ROLLOUTS)] = Field(
        "here",
        description="Where they run: on this machine, or as actors of a Ray cluster (short: "
        "--runners ray:16).",
    )
    concurrency: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        1,
        ge=1,
        description="Rollouts of an async agent that a runner executes at a time, as tasks of one "
        "process. They share its modules, and one that blocks blocks the others.",
    )
    python: Annotated[str | None, Parameter(group=_ROLLOUTS)] = Field(
        None,
        description="Interpreter that runs the agent: PATH/bin/python of another virtual "
        "environment. It needs agentrl's base install (OpenTelemetry).",
    )
    timeout: Annotated[float, Parameter(group=_ROLLOUTS)] = Field(
        300, gt=0, description="Seconds after which an attempt is killed."
    )
    lease: Annotated[float, Parameter(group=_ROLLOUTS)] = Field(
        15, ge=1, description="Seconds without a heartbeat after which a runner counts as lost."
    )
    rollouts_per_process: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        1,
        ge=1,
        description="Rollouts that a process runs in turn. 1: a fresh one for each, so that none "
        "can leave anything behind; more is quicker for agents that keep no state.",
    )
    on_error: Annotated[Policy, Parameter(group=_ROLLOUTS)] = Field(
        "retry", description="When the agent raises: retry, drop the rollout, or give a reward."
    )
    on_timeout: Annotated[Policy, Parameter(group=_ROLLOUTS)] = Field(
        "drop", description="When an attempt times out: retry, drop the rollout, or give a reward."
    )
    on_missing_reward: Annotated[Policy, Parameter(group=_ROLLOUTS)] = Field(
        "drop",
        description="When an attempt ends without a reward: retry, drop it from its group, or give "
        "a reward.",
    )
    max_attempts: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        3, ge=1, description="Attempts of a rollout that the policies may use up."
    )
    temperature: Annotated[float, Parameter(group=_ROLLOUTS)] = Field(
        1.0, ge=0, le=2, description="Sampling temperature where the agent sets none."
    )
    max_tokens: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        256, ge=1, description="Longest answer in tokens where the agent sets no limit."
    )
    max_calls_per_rollout: Annotated[int | None, Parameter(group=_ROLLOUTS)] = Field(
        None, ge=1, description="Model calls that one attempt at a rollout may make."
    )
    max_tokens_per_rollout: Annotated[int | None, Parameter(group=_ROLLOUTS)] = Field(
        None, ge=1, description="Tokens, prompts included, that one attempt at a rollout may use."
    )
    success_reward: Annotated[float, Parameter(group=_ROLLOUTS)] = Field(
        1.0, description="An evaluated rollout counts as a success from this reward on."
    )


@Parameter(name="*")
class LearningConfig(_Config):
    """How traces become weight updates."""

    min_group: Annotated[int, Parameter(group=_LEARNING)] = Field(
        2, ge=1, description="Groups that shrank below this many scored rollouts are skipped."
    )
    learning_rate: Annotated[float | None, Parameter(group=_LEARNING)] = Field(
        None,
        gt=0,
        description="Adam's learning rate; by default chosen by the model's size and "
        "alpha. It suits any rank.",
    )
    schedule: Annotated[Literal["constant", "linear", "cosine"], Parameter(group=_LEARNING)] = (
        Field("constant", description="How the learning rate falls over the steps of the run.")
    )
    warmup_steps: Annotated[int, Parameter(group=_LEARNING)] = Field(
        0, ge=0, description="Steps over which the learning rate rises first."
    )
    max_grad_norm: Annotated[float, Parameter(group=_LEARNING)] = Field(
        0.0, ge=0, description="Gradients are clipped to this norm; 0 is off."
    )
    rank: Annotated[int, Parameter(group=_LEARNING)] = Field(
        32, ge=1, le=1024, description="LoRA rank."
    )
    alpha: Annotated[float, Parameter(group=_LEARNING)] = Field(
        32, gt=0, description="LoRA alpha: the update is scaled by alpha / rank."
    )
    epochs: Annotated[int, Parameter(group=_LEARNING)] = Field(
        1,
        ge=1,
        description="Optimizer passes over the rollouts of a step (more: use a loss that clips).",
    )
    max_length: Annotated[int | None, Parameter(group=_LEARNING)] = Field(
        None, ge=2, description="Longest trajectory in tokens; by default the model's context."
    )
    micro_batch_tokens: Annotated[int | None, Parameter(group=_LEARNING)] = Field(
        None,
        ge=64,
        description="Most tokens per forward and backward pass: lower it to save memory. By "
        "default 4096 on a CPU, 16384 on a GPU.",
    )
    gradient_checkpointing: Annotated[bool, Parameter(group=_LEARNING)] = Field(
        False, description="Compute layers twice rather than keep what the backward needs."
    )


@Parameter(name="*")
class TrainSettings(ModelConfig, RolloutConfig, LearningConfig, AlgorithmConfig):
    """Everything ``agentrl train`` takes besides the agent."""

    tasks: Annotated[Path, Parameter(group=_AGENT)] = Field(
        description="Tasks to train on: a JSON-lines file, one object a line."
    )
    eval_tasks: Annotated[Path | None, Parameter(group=_AGENT)] = Field(
        None, description="Held-out tasks, never trained on."
    )
    eval_every: Annotated[int, Parameter(group=_AGENT)] = Field(
        5, ge=1, description="Steps between evaluations; first and last are always evaluated."
    )
    eval_samples: Annotated[int, Parameter(group=_AGENT)] = Field(
        1, ge=1, description="Rollouts per held-out task."
    )
    eval_temperature: Annotated[float, Parameter(group=_AGENT)] = Field(
        0.0,
        ge=0,
        le=2,
        description="Sampling temperature of evaluations; by default greedy (0), and with several "
        "samples of a task the training's.",
    )
    steps: Annotated[int | None, Parameter(group=_RUN)] = Field(
        None, ge=1, description="Optimizer steps; by default one pass over the tasks."
    )
    batch_size: Annotated[int, Parameter(group=_LEARNING)] = Field(
        16, ge=1, description="Tasks per step."
    )
    group_size: Annotated[int, Parameter(group=_LEARNING)] = Field(
        4, ge=1, description="Rollouts per task: they are compared with each other."
    )
    max_staleness: Annotated[int, Parameter(group=_LEARNING)] = Field(
        0,
        ge=0,
        description="Steps that rollouts may run ahead of the updates: above 0 both go on at the "
        "same time, and what is trained on is up to so many adapter versions old. No token is "
        "ever older, unless stale is correct.",
    )
    stale: Annotated[Literal["correct", "drop", "wait"] | None, Parameter(group=_LEARNING)] = Field(
        None,
        description="For max_staleness: a step waits for a group that would be older a step later "
        "(wait, the default); or it does not, and the group's older answers are dropped, or "
        "trained on all the same (correct). Of wait and correct, what is stale gets importance "
        "weights: correction is truncate by default.",
    )
    resample_zero_variance: Annotated[int, Parameter(group=_LEARNING)] = Field(
        0,
        ge=0,
        description="Rounds in which groups whose rewards are all equal are replaced by groups of "
        "further tasks, until the step has its batch (DAPO's dynamic sampling).",
    )
    stop_at: Annotated[float | None, Parameter(group=_RUN)] = Field(
        None, ge=0, le=1, description="Stop once the held-out accuracy reaches this."
    )
    seed: Annotated[int, Parameter(group=_RUN)] = Field(0, ge=0, description="Of everything drawn.")
    name: Annotated[str | None, Parameter(group=_RUN)] = Field(
        None, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run and its folder."
    )
    runs: Annotated[Path, Parameter(group=_RUN)] = Field(
        Path("runs"), description="Folder that holds the run folders."
    )
    store: Annotated[str | None, Parameter(group=_RUN)] = Field(
        None, description="Store: a path or PostgreSQL URL; by default a file in the run folder."
    )
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], Parameter(group=_RUN)] = (
        Field(
            default_factory=list[Literal["tensorboard", "wandb", "trackio"]],
            description="Experiment trackers that get the metrics as well; packages apart.",
        )
    )
    backend: Annotated[Literal["local", "tinker"], Parameter(group=_MODEL)] = Field(
        "local",
        description="What trains and samples: this machine, or Tinker by its official SDK "
        "(agentrl[tinker]; the key is in TINKER_API_KEY). The agent runs here either way.",
    )
    tinker_base_url: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None,
        pattern=r"^https?://",
        description="URL of a server that speaks Tinker's protocol, such as `agentrl "
        "tinker-server`; by default TINKER_BASE_URL, else Tinker itself.",
    )
    tinker_tokenizer: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None,
        description="Folder or Hugging Face name of the model's configuration, tokenizer and chat "
        "template, where that is not the name that Tinker has for it.",
    )
    gateway_host: Annotated[str, Parameter(group=_RUN)] = Field(
        "127.0.0.1",
        description="Address that the gateway listens on; 0.0.0.0 lets `agentrl runner` join from "
        "other machines. Every request needs a rollout's key.",
    )
    gateway_port: Annotated[int, Parameter(group=_RUN)] = Field(
        0, ge=0, le=65535, description="Port of the gateway; 0: any that is free."
    )
    keep_checkpoints: Annotated[int, Parameter(group=_RUN)] = Field(
        3, ge=1, description="Newest checkpoints to keep."
    )

    @model_validator(mode="after")
    def _groups_can_compare(self) -> Self:
        if self.compares and self.group_size < max(2, self.min_group):
            raise ValueError(
                f"group_size {self.group_size} is too small for estimator {self.estimator!r}: it "
                f"compares the rollouts of a group; give at least {max(2, self.min_group)}"
            )
        if self.resample_zero_variance and not self.compares:
            raise ValueError(
                f"resample_zero_variance does not go with estimator {self.estimator!r}, which "
                "learns from groups whose rewards are all equal"
            )
        return self

    @model_validator(mode="after")
    def _held_out_settings_have_effect(self) -> Self:
        if self.stop_at is not None and self.eval_tasks is None:
            raise ValueError("stop_at has no effect: it needs eval_tasks, whose accuracy it is of")
        if self.eval_samples > 1 and "eval_temperature" not in self.model_fields_set:
            self.eval_temperature = self.temperature
        return self

    @model_validator(mode="after")
    def _the_rate_is_reached(self) -> Self:
        if self.steps is not None:
            check_warmup(self.warmup_steps, self.steps)
        return self

    @model_validator(mode="after")
    def _the_backend_can_do_it(self) -> Self:
        check_backend(self)
        return self

    @model_validator(mode="after")
    def _what_is_stale_is_dealt_with(self) -> Self:
        if self.stale is not None and not self.max_staleness:
            raise ValueError("stale has no effect: it needs a max_staleness above 0")
        if self.stale == "correct" and self.correction == "none":
            raise ValueError(
                "correction 'none' and stale 'correct' contradict each other: leave correction "
                "out, or set stale to drop or wait"
            )
        return self


def check_warmup(warmup_steps: int, steps: int) -> None:
    """Raises ConfigError where the learning rate would be a part of the given one all the time."""
    if warmup_steps >= steps:
        raise ConfigError(
            f"warmup_steps: {warmup_steps} leave none of {steps} steps the whole learning rate; "
            f"give at most {steps - 1}"
        )


def greedy_note(samples: int, temperature: float) -> str | None:
    """What is to be said of several greedy samples; None where they are not."""
    if samples == 1 or temperature > 0:
        return None
    return (
        f"at temperature 0 the {samples} samples of a task differ only by what the agent or its "
        "environment draws; pass@k needs a higher one"
    )


class TrainConfig(TrainSettings):
    """A whole training run."""

    agent: str = Field(description=AGENT_HELP, min_length=1)


@Parameter(name="*")
class EvalSettings(ModelConfig, RolloutConfig):
    """Everything ``agentrl eval`` takes besides the agent."""

    tasks: Annotated[Path, Parameter(group=_AGENT)] = Field(
        description="Tasks to evaluate on: a JSON-lines file, one object a line."
    )
    adapter_path: Annotated[Path | None, Parameter(group=_MODEL)] = Field(
        None,
        description="A run folder, RUN@STEP, or a PEFT folder; without it the base model answers.",
    )
    answered_by: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None, description="Evaluate this model of the [models] table, in place of the base model."
    )
    samples: Annotated[int, Parameter(group=_AGENT)] = Field(
        1, ge=1, description="Rollouts per task, for pass@k."
    )
    temperature: Annotated[float, Parameter(group=_ROLLOUTS)] = Field(
        0.0,
        ge=0,
        le=2,
        description="Sampling temperature, whatever the agent asks for; by default greedy (0), and "
        "with several samples of a task 1, as in training.",
    )
    seed: Annotated[int, Parameter(group=_RUN)] = Field(0, ge=0, description="Of everything drawn.")
    runs: Annotated[Path, Parameter(group=_RUN)] = Field(
        Path("runs"), description="Folder that holds the run folders."
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and "temperature" not in self.model_fields_set:
            self.temperature = RolloutConfig.model_fields["temperature"].default
        return self

    @model_validator(mode="after")
    def _one_model_answers(self) -> Self:
        if self.answered_by is None:
            return self
        if self.adapter_path is not None:
            raise ValueError("answered_by and adapter_path: give one of them")
        if self.answered_by not in self.models:
            known = ", ".join(self.models) or "none"
            raise ValueError(
                f"answered_by: there is no [models.{self.answered_by}] in the file (there: {known})"
            )
        return self


class EvalConfig(EvalSettings):
    """A whole evaluation."""

    agent: str = Field(description=AGENT_HELP, min_length=1)


@Parameter(name="*")
class RunSettings(ModelConfig, RolloutConfig):
    """Everything ``agentrl run`` takes besides the agent. A failure is shown, not tried again."""

    task: Annotated[
        dict[str, Any],
        Parameter(group=_AGENT, accepts_keys=False, n_tokens=1),
        BeforeValidator(_from_json),
    ] = Field(description="The task: a JSON object, handed to the agent as it is.")
    base_url: Annotated[str | None, Parameter(group=_MODEL, name=["--base-url", "--gateway"])] = (
        Field(
            None,
            pattern=r"^https?://",
            description="Ask this server (any OpenAI base URL, `agentrl serve` too) for the model, "
            "in place of running it here.",
        )
    )
    api_key_env: Annotated[str | None, Parameter(group=_MODEL)] = Field(
        None,
        description="NAME of the environment variable that holds that server's key.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    adapter_path: Annotated[Path | None, Parameter(group=_MODEL)] = Field(
        None, description="PEFT folder of a trained adapter; without it the base model answers."
    )
    runners: Annotated[int, Parameter(show=False)] = Field(1, ge=1, le=1, description="One.")
    on_error: Annotated[Policy, Parameter(group=_ROLLOUTS)] = Field(
        "drop", description="When the agent raises: drop it, or retry, or give a reward."
    )
    seed: Annotated[int, Parameter(group=_RUN)] = Field(0, ge=0, description="Of everything drawn.")
    runs: Annotated[Path, Parameter(group=_RUN)] = Field(
        Path("runs"), description="Folder that holds the run folders."
    )


class RunConfig(RunSettings):
    """A whole run of one task."""

    agent: str = Field(description=AGENT_HELP, min_length=1)


@Parameter(name="*")
class JoinSettings(_Config):
    """Everything ``agentrl runner`` takes besides the agent."""

    store: Annotated[str, Parameter(group=_RUN)] = Field(
        description="The run's store: a PostgreSQL URL, or on the same machine its file.",
        min_length=1,
    )
    gateway: Annotated[str, Parameter(group=_RUN)] = Field(
        description="URL of the run's gateway, as this machine reaches it (see --gateway-host).",
        pattern=r"^https?://",
    )
    run: Annotated[str | None, Parameter(group=_RUN)] = Field(
        None, description="Id or name of the run; by default the newest that is under way."
    )
    runners: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        8, ge=1, le=1024, description="Worker processes that run the agent."
    )
    timeout: Annotated[float | None, Parameter(group=_ROLLOUTS)] = Field(
        None, gt=0, description="Seconds after which an attempt is killed; by default the run's."
    )
    concurrency: Annotated[int | None, Parameter(group=_ROLLOUTS)] = Field(
        None, ge=1, description="Rollouts of an async agent in one process; by default the run's."
    )
    python: Annotated[str | None, Parameter(group=_ROLLOUTS)] = Field(
        None, description="Interpreter that runs the agent: of another virtual environment."
    )
    logs: Annotated[Path, Parameter(group=_RUN)] = Field(
        Path("runner-logs"), description="Folder for the logs of this machine's runners."
    )


@Parameter(name="*")
class ServeConfig(ModelConfig):
    """Everything ``agentrl serve`` takes."""

    adapter_path: Annotated[Path | None, Parameter(group=_MODEL)] = Field(
        None, description="A trained adapter: a run folder, RUN@STEP, or a PEFT folder."
    )
    host: Annotated[str, Parameter(group=_RUN)] = Field(
        "127.0.0.1", description="Address to listen on; others than loopback need --operator-key."
    )
    port: Annotated[int, Parameter(group=_RUN)] = Field(8000, ge=0, le=65535, description="Port.")
    operator_key: Annotated[str | None, Parameter(group=_RUN)] = Field(
        None, min_length=16, description="The API key that clients must send."
    )
    max_tokens: Annotated[int, Parameter(group=_ROLLOUTS)] = Field(
        256, ge=1, description="Longest answer in tokens where the request sets no limit."
    )
    store: Annotated[str, Parameter(group=_RUN)] = Field(
        "runs/serve.db", description="Where calls are recorded: a path or PostgreSQL URL."
    )


_TABLES: dict[str, type[BaseModel]] = {"models": OtherModelConfig, "adapters": AdapterConfig}


class ConfigError(ValueError):
    """The configuration cannot be used; the message names each field, its value and the fix."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A validation error for people: the field, what it got, what is allowed."""
    lines: list[str] = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if not name:
            lines.append(problem["msg"].removeprefix("Value error, "))
            continue
        field = model.model_fields.get(name)
        if name in _TABLES and len(problem["loc"]) > 2:
            field = _TABLES[name].model_fields.get(str(problem["loc"][2]))
            name = ".".join(map(str, problem["loc"][:3]))  # models.<name>.<field>
        if problem["type"] == "extra_forbidden" or field is None:
            lines.append(f"{name}: there is no such setting; see --help for those there are")
            continue
        if problem["type"] == "missing":
            lines.append(f"{name}: is missing. {field.description}")
            continue
        said = problem["msg"].removeprefix("Value error, ")
        said = said[0].lower() + said[1:]
        got = f"got {problem['input']!r}, but "
        if name.endswith((".api_key_env", ".params")):
            got = ""  # somebody may have written a key there
        lines.append(f"{name}: {got}{said}. {field.description}")
    return "\n".join(dict.fromkeys(lines))
