"""The settings of each command: which tables it has, and its short flags.

The tables, with every default, are ``settings``'s; what does not go together is ``checks``'s.
"""

# pyright: reportIncompatibleVariableOverride=false
# A command narrows the tables that it shares with others; nothing assigns to them.

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from agentrl.config import checks
from agentrl.config.field_types import Names, Table
from agentrl.config.setting_names import model_in
from agentrl.config.settings import join, offline
from agentrl.config.settings.agent import (
    AgentSettings,
    RunAgentSettings,
    Speakers,
    SpeakerSettings,
    TrainAgentSettings,
)
from agentrl.config.settings.algorithm import AlgorithmSettings
from agentrl.config.settings.curriculum import CurriculumSettings
from agentrl.config.settings.evaluation import (
    CheckSettings,
    EvalEvaluationSettings,
    InspectSettings,
    TrainEvaluationSettings,
)
from agentrl.config.settings.gateway import (
    GatewaySettings,
    ServeGatewaySettings,
    TrainGatewaySettings,
)
from agentrl.config.settings.learning import LearningSettings, VerlSettings
from agentrl.config.settings.models import (
    Adapters,
    AdapterSettings,
    EvalModelSettings,
    ModelSettings,
    OtherModels,
    OtherModelSettings,
    RunModelSettings,
    ServeModelSettings,
)
from agentrl.config.settings.rollouts import (
    Policy,
    RolloutSettings,
    RunnerSettings,
    SingleRunnerSettings,
)
from agentrl.config.settings.run import (
    GuardSettings,
    RunFolderSettings,
    ServeRunSettings,
    TrainRunSettings,
)
from agentrl.config.settings.sampler import SamplerSettings, TinkerSettings, TrainSamplerSettings
from agentrl.config.settings.sweep import SweepSettings


def _short(text: str) -> dict[str, tuple[str, ...]]:
    """Read ``run.seed run.folder=runs``: settings whose last part, or the name given, is a flag."""
    flags: dict[str, tuple[str, ...]] = {}
    for item in text.split():
        name, _, given = item.partition("=")
        last = name.rpartition(".")[2].replace("_", "-")
        flags[name] = tuple(given.split(",")) if given else (last,)
    return flags


class _Command(Table):
    short_flags: ClassVar[dict[str, tuple[str, ...]]] = {}
    """By setting, its short flags without dashes; the short help shows these, in this order."""
    argument: ClassVar[tuple[str, str]] = ("AGENT", "agent.entrypoint")
    """The argument without a flag: its name in the help, and the setting that it is."""

    @model_validator(mode="before")
    @classmethod
    def _missing_tables_are_empty(cls, given: Any) -> Any:
        tables = [key for key, field in cls.model_fields.items() if model_in(field.annotation)]
        return {name: {} for name in tables} | given if isinstance(given, dict) else given


class ModelCommand(_Command):
    """What every command has that loads a model."""

    model: ModelSettings = ModelSettings()
    adapters: Adapters = Field(default_factory=dict[str, AdapterSettings])
    """Several adapters, trained together, instead of one: NAME,NAME or, for which agents and
    rewards train each, [adapters.NAME] in a file. Agents request them by name."""
    models: OtherModels = Field(default_factory=dict[str, OtherModelSettings])
    """Other models by the name that the agent requests, recorded and never trained: [models.NAME]
    in a file, JSON in a flag."""
    speakers: Speakers = Field(default_factory=dict[str, SpeakerSettings])
    """Agents (roles) by what their requests hold, for clients that name none, as coding agents do:
    [speakers.NAME] in a file, JSON in a flag. The first that fits names the call's agent."""
    sampler: SamplerSettings = SamplerSettings()
    gateway: GatewaySettings = GatewaySettings()

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        checks.check_models(self)
        return self

    @property
    def gateway_count(self) -> int:
        """How many gateways there are: at least one for each sampler."""
        return max(1, len(self.sampler.vllm.url))

    @property
    def trained(self) -> dict[str, AdapterSettings]:
        """The adapters, by the names that agents request."""
        return self.adapters or {self.model.adapter: AdapterSettings()}

    @property
    def adapter_of_agent(self) -> dict[str, str]:
        """By role, where an adapter names its agents."""
        return {agent: name for name, one in self.trained.items() for agent in one.agents or []}

    @property
    def sole_adapter(self) -> str | None:
        """The one that answers every requested name; None if there are several."""
        return next(iter(self.trained)) if len(self.trained) == 1 else None


class ScoredCommand(ModelCommand):
    """What every command has whose rollouts are rewarded."""

    rewards: Names = Field(default_factory=list[str])
    """Functions that reward a finished rollout, beside what the agent emits. Each is
    module:function, file.py:function, or model:RUN for a reward model. A function takes the
    rollout's trace; agentrl.rewards has ready ones. The flag can be given several times."""
    rollouts: RunnerSettings = RunnerSettings()

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.rewards and (missing := self.rollouts.on_missing_reward) != "drop":
            raise ValueError(
                f"rollouts.on_missing_reward: {missing!r} acts when the attempt ends, before its "
                "rewards are computed; leave it out, and let a function return that number"
            )
        return self


class TrainConfig(ScoredCommand):
    """A training run."""

    short_flags = _short(
        "agent.tasks evaluation.tasks=eval-tasks rewards agent.python agent.user=agent-user "
        "agent.sandbox=sandbox agent.harbor_agent model.name=model "
        "sampler.kind=sampler sampler.samplers run.backend rollouts.runners "
        "rollouts.rollouts_per_process rollouts.timeout sampler.max_tokens "
        "sampler.temperature rollouts.batch_size rollouts.group_size rollouts.max_staleness "
        "algorithm.loss algorithm.estimator "
        "learning.learning_rate learning.rank learning.init_adapter learning.init_optimizer "
        "learning.trainers learning.shard_base "
        "gateway.gateways gateway.allowed_hosts=allowed-host run.steps run.ui guards.max_hours "
        "guards.max_run_tokens guards.max_cost run.seed run.name run.folder=runs"
    )

    agent: TrainAgentSettings
    evaluation: TrainEvaluationSettings = TrainEvaluationSettings()
    rollouts: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    learning: LearningSettings = LearningSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    sampler: TrainSamplerSettings = TrainSamplerSettings()
    gateway: TrainGatewaySettings = TrainGatewaySettings()
    tinker: TinkerSettings = TinkerSettings()
    verl: VerlSettings = VerlSettings()
    guards: GuardSettings = GuardSettings()
    run: TrainRunSettings = TrainRunSettings()

    @property
    def gateway_count(self) -> int:
        return max(super().gateway_count, self.gateway.gateways, self.sampler.samplers)

    @property
    def parts_of_base(self) -> int | None:
        """Into how many parts FSDP2 spreads the base model, with verl on each node; None: each
        trainer has all of it."""
        spread = self.learning.shard_base or self.run.backend == "verl"
        return self.learning.trainers // self.verl.nodes if spread else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.check_train(self)
        self.evaluation.sample_several(self.sampler)
        return self


class CheckRolloutSettings(RolloutSettings):
    on_error: Policy = "drop"
    """When the agent raises: drop, retry, or a reward."""


class CheckConfig(TrainConfig):
    """A look at a training before its first step. A failure is shown, not retried."""

    short_flags = _short("check.tasks=check-tasks check.samples") | TrainConfig.short_flags

    rollouts: CheckRolloutSettings = CheckRolloutSettings()
    check: CheckSettings = CheckSettings()


class SweepConfig(TrainConfig):
    """A sweep. The settings besides its own table are those of every trial."""

    short_flags = _short("sweep.trials sweep.parallel") | TrainConfig.short_flags

    sweep: SweepSettings


class EvalConfig(ScoredCommand):
    """An evaluation."""

    short_flags = _short(
        "evaluation.tasks evaluation.samples evaluation.temperature evaluation.success_reward "
        "evaluation.by evaluation.fail_under rewards "
        "agent.python agent.user=agent-user agent.sandbox=sandbox agent.harbor_agent "
        "model.name=model model.adapter_path model.answered_by sampler.kind=sampler "
        "sampler.max_tokens rollouts.runners rollouts.rollouts_per_process rollouts.timeout "
        "run.seed run.folder=runs"
    )

    agent: AgentSettings
    evaluation: EvalEvaluationSettings
    rollouts: RunnerSettings = RunnerSettings()
    model: EvalModelSettings = EvalModelSettings()
    run: RunFolderSettings = RunFolderSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        name, known = self.model.answered_by, ", ".join(self.models) or "none"
        if name is not None and name not in self.models:
            raise ValueError(
                f"model.answered_by: there is no [models.{name}] in the file (there: {known})"
            )
        if len({*self.model.adapter_path}) < len(self.model.adapter_path):
            raise ValueError("model.adapter_path: an adapter is there twice; give it once")
        self.evaluation.sample_several(self.sampler)
        return self


class RunConfig(ModelCommand):
    """A run of one task. A failure is shown, not retried."""

    short_flags = _short(
        "agent.task agent.python agent.user=agent-user agent.sandbox=sandbox model.name=model "
        "model.adapter_path model.base_url=base-url,gateway model.api_key_env sampler.kind=sampler "
        "sampler.max_tokens sampler.temperature rollouts.timeout run.seed run.folder=runs"
    )

    agent: RunAgentSettings
    rollouts: SingleRunnerSettings = SingleRunnerSettings()
    model: RunModelSettings = RunModelSettings()
    run: RunFolderSettings = RunFolderSettings()


class ServeConfig(ModelCommand):
    """A served model."""

    short_flags = _short(
        "model.name=model model.adapter_path model.device model.trust_remote_code gateway.host "
        "gateway.port gateway.operator_key gateway.allowed_hosts=allowed-host "
        "sampler.kind=sampler sampler.max_tokens run.store"
    )

    model: ServeModelSettings = ServeModelSettings()
    gateway: ServeGatewaySettings = ServeGatewaySettings()
    run: ServeRunSettings = ServeRunSettings()


class OfflineConfig(_Command):
    """What every command has that trains on examples which are there already."""

    kind: ClassVar[str]
    """Its name and the kind of its runs."""
    data: offline.DataSettings = offline.DataSettings()
    model: ModelSettings = ModelSettings()
    learning: offline.OfflineLearningSettings = offline.OfflineLearningSettings()
    evaluation: offline.OfflineEvaluationSettings = offline.OfflineEvaluationSettings()
    run: offline.OfflineRunSettings = offline.OfflineRunSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.check_offline(self)
        return self


_DATA = "data.source=data data.from_run data.where"
_LEARNED = (
    "model.name=model learning.epochs learning.batch_size learning.learning_rate learning.rank "
    "learning.init_adapter learning.init_optimizer learning.trainers learning.shard_base "
    "evaluation.every evaluation.patience run.seed run.name run.folder=runs"
)


class SftConfig(OfflineConfig):
    """A supervised fine-tuning."""

    kind = "sft"
    short_flags = _short(
        f"{_DATA} data.best_of data.from_served data.held_out data.train_on model.chat_template "
        f"{_LEARNED}"
    )

    data: offline.SftDataSettings = offline.SftDataSettings()


class PreferConfig(OfflineConfig):
    """A preference optimization."""

    kind = "prefer"
    short_flags = _short(
        f"{_DATA} data.by data.held_out preference.loss preference.beta preference.gamma {_LEARNED}"
    )

    data: offline.PreferenceDataSettings = offline.PreferenceDataSettings()
    preference: offline.PreferenceSettings = offline.PreferenceSettings()


class RewardModelConfig(OfflineConfig):
    """A training of a reward model."""

    kind = "reward-model"
    short_flags = _short(f"{_DATA} data.by data.held_out reward_model.loss {_LEARNED}")

    data: offline.PreferenceDataSettings = offline.PreferenceDataSettings()
    reward_model: offline.RewardModelSettings = offline.RewardModelSettings()


class InspectConfig(ModelCommand):
    """A task of inspect_ai."""

    short_flags = _short(
        "inspect.command inspect.args model.name=model model.adapter_path model.device "
        "model.trust_remote_code sampler.kind=sampler sampler.max_tokens run.store"
    )
    argument = ("TASK", "inspect.task")

    inspect: InspectSettings
    model: ServeModelSettings = ServeModelSettings()
    run: ServeRunSettings = ServeRunSettings()


class JoinConfig(_Command):
    """More runners for a run in progress."""

    short_flags = _short(
        "run.store gateway.url=gateway run.id=run rollouts.runners rollouts.timeout "
        "rollouts.concurrency agent.python agent.user=agent-user agent.sandbox=sandbox run.logs"
    )

    agent: join.JoinAgentSettings = join.JoinAgentSettings()
    rollouts: join.JoinRolloutSettings = join.JoinRolloutSettings()
    gateway: join.JoinGatewaySettings = join.JoinGatewaySettings()
    run: join.JoinRunSettings


def is_resumable(command: type[Table]) -> bool:
    """Tell whether a command takes --resume."""
    return command is TrainConfig or issubclass(command, OfflineConfig)


COMMANDS: dict[str, type[_Command]] = {
    "train": TrainConfig,
    "check": CheckConfig,
    "sweep": SweepConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "reward-model": RewardModelConfig,
    "eval": EvalConfig,
    "run": RunConfig,
    "serve": ServeConfig,
    "inspect": InspectConfig,
    "runner": JoinConfig,
}
