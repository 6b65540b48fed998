"""Every setting of every command, with its type, default and meaning: a model for each table.

A setting is a key in a file (``[rollouts] group_size``), an environment variable
(``AGENTRL_ROLLOUTS__GROUP_SIZE``) and a flag (``--rollouts.group-size``); ``loading`` reads them.
Relative paths are relative to the working directory. Checks that concern several settings are in
``checks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agentrl.config.field_types import (
    AdapterName,
    Count,
    HostName,
    HttpUrl,
    Names,
    NonNegative,
    Pattern,
    Positive,
    Store,
    Table,
    Variable,
    Whole,
    from_json,
    from_names,
    names_as_table,
)  # fmt: skip
from agentrl.config.secrets import check_params, check_url
from agentrl_tracer.schemas import MAX_REWARD
from agentrl_trainer.names import check_name

Policy = Literal["retry", "drop"] | Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Readers = Literal["owner", "group", "everyone"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Trackers = Annotated[list[Tracker], BeforeValidator(from_names)]


class EvaluationSettings(Table):
    """Rollouts of held-out tasks."""

    samples: Count = 1
    """Rollouts per held-out task, for pass@k."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of evaluations, whatever the agent requests. By default greedy (0); with
    several samples per task, the training's (`agentrl eval`: 1)."""
    success_reward: float = 1.0
    """Reward from which an evaluated rollout counts as a success."""

    def sample_several(self, sampler: SamplerSettings) -> None:
        """Take the sampler's temperature for several samples, unless one is given."""
        if self.samples > 1 and "temperature" not in self.model_fields_set:
            self.temperature = sampler.temperature


class EvalEvaluationSettings(EvaluationSettings):
    tasks: Path
    """Tasks to evaluate on: a JSON-lines file, one object a line."""


class CheckSettings(Table):
    """The rollouts of ``agentrl check``."""

    tasks: Count = 4
    """Tasks to try: those of the first steps of a training with the same seed."""
    samples: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task."""


class RunnerSettings(Table):
    """The processes that run the agent."""

    runners: Annotated[int, Field(ge=1, le=1024)] = 8
    """Worker processes that run the agent; ray:16 is 16 on Ray. By default up to 32 for a model
    other than agentrl-tiny, where the agent is Python code that forks run."""
    runners_on: Literal["here", "ray"] = "here"
    """Run them on this machine, or as actors of a Ray cluster."""
    concurrency: Count = 1
    """Rollouts of an async agent that a process runs at a time; they share its modules."""
    rollouts_per_process: Count = 1
    """Rollouts that a process runs in turn. 1 starts a fresh process for each; more is faster."""
    timeout: Positive = 300
    """Seconds after which an attempt is killed."""
    lease: Annotated[float, Field(ge=1)] = 15
    """Seconds without a heartbeat after which a runner counts as lost."""
    on_error: Policy = "retry"
    """When the agent raises: retry, drop the rollout, or assign a reward."""
    on_timeout: Policy = "drop"
    """When an attempt times out: retry, drop it, or assign a reward."""
    on_missing_reward: Policy = "drop"
    """When an attempt emits no reward: retry, drop it, or assign a reward."""
    max_attempts: Count = 3
    """Attempts per rollout, the first included."""
    log_mib: Annotated[int, Field(ge=1, le=65536)] = 4
    """MiB of output that an attempt's log keeps: its beginning and its end."""
    max_calls_per_rollout: Count | None = None
    """Model calls that one attempt may make; by default no limit."""
    max_tokens_per_rollout: Count | None = None
    """Tokens, prompts included, that one attempt may use."""

    @model_validator(mode="before")
    @classmethod
    def _read_place(cls, given: Any) -> Any:
        """Read ``runners = "ray:16"`` as 16 runners on Ray, and ``"ray"`` as the default number."""
        if not isinstance(given, dict):
            return given
        place, _, count = str(given.get("runners", "")).partition(":")
        if place != "ray":
            return given
        rest = {name: value for name, value in given.items() if name != "runners"}
        return {**rest, "runners_on": "ray"} | ({"runners": count} if count else {})


class RolloutSettings(RunnerSettings):
    """The rollouts of a training step, and how they are executed."""

    batch_size: Count = 16
    """Tasks per step."""
    group_size: Count = 4
    """Rollouts per task, compared with each other."""
    min_group: Count = 2
    """Scored rollouts below which a group is skipped."""
    max_staleness: Whole = 0
    """Steps that rollouts may run ahead of the updates. Above 0 both run at the same time, and
    trained tokens are up to so many adapter versions old."""
    stale: Literal["correct", "drop", "wait"] | None = None
    """With max_staleness, for a group that would get older than that: the step waits for it (wait,
    the default), drops its older answers (drop), or trains on them (correct)."""
    resample_zero_variance: Whole = 0
    """Rounds in which groups with equal rewards are replaced by groups of further tasks, until the
    step has its batch (DAPO's dynamic sampling)."""


class SingleRunnerSettings(RunnerSettings):
    runners: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    on_error: Policy = "drop"
    """When the agent raises: drop, retry, or a reward."""


class LearningSettings(Table):
    """The adapter and its optimizer."""

    learning_rate: Positive | None = None
    """Adam's; by default chosen by the model's size and alpha."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the steps of the run."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises to its full value."""
    max_grad_norm: NonNegative = 0.0
    """Clip gradients to this norm; 0 is off."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """LoRA rank."""
    alpha: Positive = 32
    """LoRA alpha: updates are scaled by alpha / rank."""
    epochs: Count = 1
    """Optimizer passes over a step's rollouts; above 1 use a clipping loss."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest trajectory in tokens; by default the model's context."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] | None = None
    """Tokens whose activations are held: those of a forward pass, and as many of longer shared
    prefixes as remain; lower saves memory. By default 16384 on CUDA, else 4096."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""


class ModelSettings(Table):
    """The base model and its adapter."""

    name: Annotated[str, Field(min_length=1)] = "agentrl-tiny"
    """Base model: agentrl-tiny or smollm2-135m (built in), a folder, or a Hugging Face name."""
    device: str = "auto"
    """Torch device of sampler and trainer: auto, cpu, cuda, cuda:1, mps, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the base model; the adapter trains in float32."""
    cores: Count | None = None
    """CPU cores for sampler and trainer; by default all that this process may use. A run that is
    resumed keeps its number, because the last bits of its figures depend on it."""
    load_in_4bit: bool = False
    """Load the base model's linear layers in 4 bits (NF4, as in QLoRA)."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. It could do anything."""
    adapter: AdapterName = "policy"
    """Name of the adapter: the model name that the agent requests."""


class ServeModelSettings(ModelSettings):
    adapter_path: Path | None = None
    """A run folder, RUN@STEP, RUN@best, or a PEFT folder; by default the base model."""


class EvalModelSettings(ServeModelSettings):
    answered_by: str | None = None
    """Evaluate this model of the [models] table instead of the base model."""


class RunModelSettings(ServeModelSettings):
    base_url: HttpUrl | None = None
    """Call the model at this OpenAI base URL (`agentrl serve` too), instead of loading it here."""
    api_key_env: Variable | None = None
    """NAME of the environment variable that holds that server's key."""


class VllmSamplerSettings(Table):
    """The vLLM server that samples with ``sampler.kind = "vllm"``."""

    python: Path | None = None
    """Interpreter that has vLLM, best in its own environment; by default this one."""
    args: str = ""
    """More arguments for the server that is started, for instance '--gpu-memory-utilization 0.4' to
    leave the trainer room on a shared GPU."""
    url: (
        Annotated[str, Field(pattern="^(https?://|unix:/).+"), AfterValidator(check_url)] | None
    ) = None
    """URL of a running vLLM server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which
    sees the run folder under the same path."""
    wait: NonNegative = 60
    """Seconds to wait at the start for the server at url."""
    key_env: Variable | None = None
    """NAME of the environment variable that holds that server's API key."""


class SamplerSettings(Table):
    """What samples the model, and its defaults."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """What samples: the embedded engine, or a vLLM server."""
    weights: Literal["model", "int8"] = "model"
    """Weights that the embedded sampler computes with: the model's, or on a CPU 8-bit ones, which
    decode faster. Then its policy differs a little from the trainer's, and by default
    algorithm.correction.mode is truncate."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature where the request sets none."""
    max_tokens: Count = 256
    """Longest answer in tokens where the request sets no limit."""
    thinking: bool | None = None
    """Whether the model thinks before it answers where the request does not say, for models whose
    chat template has a switch (`enable_thinking`); by default the template decides."""
    vllm: VllmSamplerSettings = VllmSamplerSettings()


class TinkerSettings(Table):
    """Tinker, or a server that speaks its protocol, of ``run.backend = "tinker"``."""

    base_url: HttpUrl | None = None
    """URL of a server that speaks Tinker's protocol, such as `agentrl tinker-server`; by default
    TINKER_BASE_URL, else Tinker itself."""
    tokenizer: str | None = None
    """Folder or Hugging Face name of the model's configuration, tokenizer and chat template, where
    it differs from model.name."""


class GatewaySettings(Table):
    """The gateway that answers the agents' requests."""

    allowed_hosts: Annotated[list[HostName], BeforeValidator(from_names)] = Field(
        default_factory=list[str]
    )
    """Names by which clients may address the gateway, besides its address and loopback's: those of
    a proxy or a DNS alias. *.example.com is every name below it, * is any."""
    accept_any_model: bool = True
    """Answer unknown model names (gpt-4o-mini) with the adapter; else with 404."""
    leave_out_tools: bool = False
    """Leave tools that only a provider runs (web search, code interpreter) out of requests, and
    note them on the call; else such requests get 400."""
    forward_otlp: HttpUrl | None = None
    """Base URL of an OTLP backend (Jaeger, Phoenix, Langfuse) that gets every span, call and reward
    too. Headers: AGENTRL_FORWARD_OTLP_HEADERS=name=value,..."""
    max_concurrent: Count = 1024
    """Requests in progress, above which further ones get 429."""
    max_queued: Count = 1024
    """Answers waiting to be sampled, above which requests get 429."""
    receive_timeout: Positive = 60
    """Seconds a client has to send a whole request."""
    receive_mib: Annotated[int, Field(ge=32)] = 128
    """MiB of request bodies in transfer, above which large ones get 429."""
    stall_timeout: Positive = 60
    """Seconds a client may leave an answer unread before it is dropped."""
    grace: Whole = 5
    """Seconds for answers in progress at shutdown."""


class TrainGatewaySettings(GatewaySettings):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets `agentrl runner` join from other machines. Every request
    needs a rollout's key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 is any free one."""


class ServeGatewaySettings(GatewaySettings):
    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs operator_key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port."""
    operator_key: Annotated[str, Field(min_length=16)] | None = None
    """API key that clients must send."""


class RunFolderSettings(Table):
    """Where a run keeps its data, and its seed."""

    folder: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: Whole = 0
    """Seed of everything random."""


class TrainRunSettings(RunFolderSettings):
    name: Annotated[str, AfterValidator(check_name)] | None = None
    """Name of the run and its folder."""
    steps: Count | None = None
    """Optimizer steps; by default one pass over the tasks."""
    backend: Literal["local", "tinker"] = "local"
    """What trains and samples: this machine, or Tinker. Extra: `tinker`; key: TINKER_API_KEY."""
    store: Store | None = None
    """Store: a path or PostgreSQL URL; by default a file in the run folder. os.environ/NAME stands
    for a password in the environment: postgresql://me:os.environ/NAME@host/agentrl."""
    trackers: Trackers = Field(default_factory=list[Tracker])
    """Experiment trackers that also get metrics and samples; packages of their own."""
    group: Annotated[str, AfterValidator(check_name)] | None = None
    """Group of runs that this one belongs to, such as a sweep; trackers show it."""
    adapter_readers: Readers = "owner"
    """Who may read the adapters: another user's vLLM server needs group or everyone. The group is
    that of the folder that holds the run."""
    keep_checkpoints: Count = 3
    """Newest checkpoints to keep."""
    keep_adapters: Annotated[int, Field(ge=4)] | None = None
    """Newest versions of each adapter to keep; by default all. Versions that were evaluated, those
    of kept checkpoints, and folders that hold a file named keep stay."""
    ui: bool = False
    """Show the run in a browser while it trains. Starts `agentrl ui` beside it, prints its link."""
    keep_logs: Count = 1000
    """Newest logs of attempts to keep; those of unfinished rollouts stay, too."""


class ServeRunSettings(Table):
    store: Store = "runs/serve.db"
    """Where calls are recorded: a path or PostgreSQL URL."""


class OtherModelSettings(Table):
    """A model that another server answers: an answerer, a judge, a search model."""

    model: Annotated[str, Field(min_length=1)]
    """LiteLLM's name of the model, for instance openai/gpt-4o-mini."""
    api_base: Annotated[str, AfterValidator(check_url)] | None = None
    """URL of the provider; by default LiteLLM's for it."""
    api_key_env: Variable | None = None
    """NAME of the environment variable that holds the key; never the key itself."""
    timeout: Positive = 120
    """Seconds after which one try is canceled."""
    num_retries: Whole = 2
    """Further tries after a failure."""
    fallbacks: Names = Field(default_factory=list[str])
    """Other models of this table to call when it fails."""
    params: Annotated[dict[str, Any], BeforeValidator(from_json), AfterValidator(check_params)] = (
        Field(default_factory=dict[str, Any])
    )
    """More of LiteLLM's parameters; no keys: os.environ/NAME stands for one in the environment, as
    in extra_headers = {authorization = "Bearer os.environ/NAME"}."""


class AdapterSettings(Table):
    """One of several adapters that train together."""

    agents: Annotated[Names, Field(min_length=1)] | None = None
    """Agents (roles) that train it. It answers their calls that name no other adapter, and only
    theirs train it. By default every call that it answers."""
    rewards: Annotated[Names, Field(min_length=1)] | None = None
    """Names of the rewards that count for it, summed; by default all of them."""


class SpeakerSettings(Table):
    """How the requests of an agent (role) are known. Each pattern is a regular expression that must
    be found; without any, every request fits."""

    system: Pattern | None = None
    """In the system prompt."""
    last: Pattern | None = None
    """In the last message."""
    model: Pattern | None = None
    """In the requested model's name."""
    headers: dict[str, Pattern] = Field(default_factory=dict[str, str])
    """In each of these headers."""
    tools: bool | None = None
    """Whether the request has tools."""


OtherModels = Annotated[dict[str, OtherModelSettings], BeforeValidator(from_json)]
Speakers = Annotated[dict[str, SpeakerSettings], BeforeValidator(from_json)]
Adapters = Annotated[dict[str, AdapterSettings], BeforeValidator(names_as_table)]
