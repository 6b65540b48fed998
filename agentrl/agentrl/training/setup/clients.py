"""Make the training clients of a run, one for each adapter: on this machine, verl or Tinker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.capacity import available_cores, trainer_threads
from agentrl.config.commands import TrainConfig
from agentrl.config.settings.learning import LearningSettings, VerlSettings
from agentrl.config.settings.models import ModelSettings
from agentrl.ray_cluster import join_or_start, places_of
from agentrl.runs.folder import RunFolder
from agentrl.training.session import RunError
from agentrl.training.setup.algorithm import REFERENCE, value_params
from agentrl.training.setup.initial_adapters import create_adapters
from agentrl_trainer.client import ServiceClient, TrainingClient
from agentrl_trainer.distributed.plan import RankError, SetupCall
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.optimizers import default_learning_rate
from agentrl_trainer.memory import fitting_token_budget
from agentrl_trainer.models.devices import choose_device
from agentrl_trainer.models.loading import load_facts
from agentrl_trainer.models.lora import (
    adapter_parameters,
    count_parameters,
    parameters_in_name,
)

_ADD_LOSS = "agentrl.training.setup.own_functions:add_own_loss"


@dataclass(frozen=True, slots=True)
class TrainingClients:
    """A backend's service, and its training clients by adapter."""

    service: ServiceClient
    clients: dict[str, TrainingClient]
    context_length: int
    tokenizer: Any
    """The base model's, with its chat template."""
    peak_learning_rate: float
    failures: tuple[type[Exception], ...] = ()
    """What the clients raise when the backend's service fails."""

    def close(self) -> None:
        """End the session with the service; a failure of the service is ignored by now."""
        with contextlib.suppress(*self.failures):
            self.service.close()


def create_clients(
    config: TrainConfig, folder: Path, note: Callable[[str], None]
) -> TrainingClients:
    """Create fresh adapters over the base model.

    Args:
        folder: of the run; the clients save there.
        note: receives remarks on how the model is trained.

    Raises:
        RunError: the backend refuses; the message says what to change.
    """
    torch.set_num_threads(1)  # until the model's size is known
    if config.run.backend == "tinker":
        return _on_tinker(config, folder)
    return local_clients(
        config.model, config.learning, folder, note, names=list(config.trained),
        seed=config.run.seed, value=value_params(config), reference=config.algorithm.kl.reference,
        alone=not config.rollouts.max_staleness, setup=[(_ADD_LOSS, (config,))],
        ray_places=places_of(config), verl=config.verl if config.run.backend == "verl" else None,
    )  # fmt: skip


def local_clients(
    model: ModelSettings,
    learning: LearningSettings,
    folder: Path,
    note: Callable[[str], None],
    *,
    names: Sequence[str],
    seed: int,
    value: ValueParams | None = None,
    reference: Path | None = None,
    alone: bool = True,
    score: bool = False,
    setup: Sequence[SetupCall] = (),
    ray_places: int = 0,
    verl: VerlSettings | None = None,
) -> TrainingClients:
    """Create fresh adapters over the base model, with seeds of their own.

    Args:
        names: of the adapters.
        value: how a value function learns beside them.
        reference: the adapter that is the reference of the KL.
        alone: no sampler computes at the same time.
        score: the adapters are reward models.
        setup: what other trainers than the first call when they start.
        ray_places: that a Ray cluster which is started here should have.
        verl: train on verl's workers, not on this machine.

    Raises:
        RunError: the trainers cannot start, have too few GPUs, or compute something else.
    """
    ranks: dict[str, Any] = {"size": learning.trainers, "setup": setup}
    if verl is None:
        ranks |= {"launch": learning.trainers_on, "shard": learning.shard_base}
    else:
        ranks |= {"nodes": verl.nodes, "engine": verl.engine, "of_model": verl.model}
    here, gpus = verl is None and learning.trainers_on == "here", torch.cuda.device_count()
    if here and choose_device(model.device).type != "cpu" and learning.trainers > max(gpus, 1):
        raise RunError(f"learning.trainers: {learning.trainers} need a GPU each; here are {gpus}")
    if not here:
        join_or_start("learning.trainers", ray_places or learning.trainers)
    service = ServiceClient(
        backend="local" if verl is None else "verl", folder=folder,
        device=model.device, dtype=model.dtype, load_in_4bit=model.load_in_4bit,
        trust_remote_code=model.trust_remote_code, chat_template=model.chat_template,
        token_budget=learning.micro_batch_tokens if verl else token_budget_of(model, learning),
        gradient_checkpointing=learning.gradient_checkpointing, value=value, score=score,
        trainers=ranks,
    )  # fmt: skip
    try:
        clients = create_adapters(service, model.name, learning, names, seed, RunFolder(folder))
        client = next(iter(clients.values()))
        if verl is not None:
            _check_gradient(client, names[0])
    except RankError as error:
        raise RunError(f"{'run.backend' if verl else 'learning.trainers'}: {error}") from error
    base = client.local(lambda learner: learner.base).result()
    for name, of in clients.items():
        if said := of.local(lambda learner, name=name: learner.what_is_trained(name)).result():
            note(f"{name}: {said}")
    if why := client.local(lambda learner: learner.why_not_shared).result():
        note(f"shared prefixes are computed again for each row: {why}")
    if reference is not None:
        client.local(lambda learner: learner.add_reference(REFERENCE, reference)).result()

    # The default rate depends on the base model and one adapter, however many are trained.
    others = [*list(clients)[1:], REFERENCE]
    whole = client.local(lambda learner: learner.model).result()
    left_out = {id(p) for name in others for p in adapter_parameters(whole, name).values()}
    parameters = sum(
        parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        for parameter in whole.parameters()
        if id(parameter) not in left_out
    )
    threads = trainer_threads(model.cores or available_cores(), parameters, alone=alone)
    # On the thread that computes: another one's number stays as it was.
    threads = max(threads // learning.trainers, 1)
    client.local(lambda _: torch.set_num_threads(threads)).result()
    rate = learning.learning_rate or default_learning_rate(parameters, learning.alpha)
    known = service, clients, base.context_length, base.tokenizer, rate
    return TrainingClients(*known, failures=(RankError,))


def _check_gradient(client: TrainingClient, name: str) -> None:
    """Start verl's workers, and ask whether what they compute is a gradient."""
    from agentrl_trainer.distributed.verl.probe import wrong_gradient

    if wrong := client.local(lambda learner: wrong_gradient(learner, name)).result():
        raise RunError(
            f"run.backend: verl does not compute what is trained: {wrong}. Leave out options of "
            "verl.engine and verl.model, or use another version of verl"
        )


def token_budget_of(model: ModelSettings, learning: LearningSettings) -> int:
    """Return the tokens of a micro-batch: those of the settings, or what fits."""
    if learning.micro_batch_tokens:
        return learning.micro_batch_tokens
    return fitting_token_budget(
        model.name, rank=learning.rank, device=choose_device(model.device), dtype=model.dtype,
        gradient_checkpointing=learning.gradient_checkpointing,
    )  # fmt: skip


def _on_tinker(config: TrainConfig, folder: Path) -> TrainingClients:
    import tinker

    from agentrl_trainer.client.tinker.service import TinkerServiceClient

    model = config.model.name
    source = config.tinker.tokenizer or model
    facts = load_facts(source, **config.model.of_tokenizer)
    rate = config.learning.learning_rate
    if rate is None:
        parameters = count_parameters(source, config.learning.rank) or parameters_in_name(model)
        if parameters is None:
            raise RunError(
                "learning_rate: is missing, and its default depends on the size of "
                f"{model}, which is not known; give learning.learning_rate"
            )
        rate = default_learning_rate(parameters)
    failures = (tinker.TinkerError, ConnectionError)
    unlike = (AssertionError, KeyError)  # the SDK's, of answers that it does not know
    try:
        service = TinkerServiceClient(base_url=config.tinker.base_url, folder=folder)
        served = {one.model_name: one for one in service.get_server_capabilities().supported_models}
        names, seed = list(config.trained), config.run.seed
        clients = create_adapters(service, model, config.learning, names, seed, RunFolder(folder))
        wrong = service.wrong_objective(model, config.learning.rank)
    except (ValueError, *unlike, *failures) as error:
        raise RunError(f"run.backend: Tinker refuses to train {model}: {error}") from error
    if wrong:
        where = config.tinker.base_url or "Tinker"
        raise RunError(
            f"run.backend: {where} does not compute what Tinker computes: {wrong}. Use another "
            "version or backend of that server, or backend = 'local'"
        )
    limit = served[model].max_context_length if model in served else None
    context_length = min(facts.context_length, limit or facts.context_length)
    return TrainingClients(service, clients, context_length, facts.tokenizer, rate, failures)
