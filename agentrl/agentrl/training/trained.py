"""What a run trains: the service of its backend, and a training client for each adapter.

Knows how the configuration becomes clients, and what a run asks about the model besides. Does not
know steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.algorithm import REFERENCE, value_params
from agentrl.config.commands import TrainConfig
from agentrl.training.session import RunError
from agentrl_trainer.client import ServiceClient, TrainingClient
from agentrl_trainer.learner.schedules import default_learning_rate
from agentrl_trainer.models.loading import load_facts
from agentrl_trainer.models.model_size import count_parameters, parameters_in_name


@dataclass(frozen=True, slots=True)
class Trained:
    service: ServiceClient
    clients: dict[str, TrainingClient]
    """By adapter."""
    context_length: int
    peak_learning_rate: float
    failures: tuple[type[Exception], ...] = ()
    """What the backend's clients raise when the service fails, rather than the run."""

    def close(self) -> None:
        """Ends the session; a service that fails now has nothing more to give, and forgets it."""
        with contextlib.suppress(*self.failures):
            self.service.close()


def load_trained(
    config: TrainConfig, adapters: Iterable[str], folder: Path, note: Callable[[str], None]
) -> Trained:
    """Fresh adapters over the base model. ``note`` is told what is worth knowing.

    Raises:
        RunError: the backend does not give them; why, and what to change.
    """
    import torch

    torch.set_num_threads(1)  # gateway and runners want the other cores
    if config.run.backend == "tinker":
        return _on_tinker(config, adapters, folder)
    return _here(config, adapters, folder, note)


def _here(
    config: TrainConfig, adapters: Iterable[str], folder: Path, note: Callable[[str], None]
) -> Trained:
    service = ServiceClient(
        folder=folder,
        device=config.model.device,
        dtype=config.model.dtype,
        load_in_4bit=config.model.load_in_4bit,
        trust_remote_code=config.model.trust_remote_code,
        token_budget=config.learning.micro_batch_tokens,
        gradient_checkpointing=config.learning.gradient_checkpointing,
        value=value_params(config),
    )
    clients = {
        name: service.create_lora_training_client(
            config.model.name,
            config.learning.rank,
            config.run.seed + index,
            alpha=config.learning.alpha,
            name=name,
        )
        for index, name in enumerate(adapters)
    }
    client = next(iter(clients.values()))
    base = client.local(lambda learner: learner.base).result()
    for name, of in clients.items():
        if said := of.local(lambda learner, name=name: learner.what_is_trained(name)).result():
            note(f"{name}: {said}")
    if why := client.local(lambda learner: learner.why_not_shared).result():
        note(f"shared prefixes are computed for each row anew: {why}")
    if (reference := config.algorithm.kl.reference) is not None:
        client.local(lambda learner: learner.add_reference(REFERENCE, reference)).result()

    # Of the base and one adapter: how many others train beside it is of no account.
    others = [f".{name}." for name in (*list(clients)[1:], REFERENCE)]
    parameters = sum(
        parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        for name, parameter in base.model.named_parameters()
        if not any(other in name for other in others)
    )
    return Trained(
        service,
        clients,
        base.context_length,
        config.learning.learning_rate or default_learning_rate(parameters, config.learning.alpha),
    )


def _on_tinker(config: TrainConfig, adapters: Iterable[str], folder: Path) -> Trained:
    model = config.model.name
    source = config.tinker.tokenizer or model
    facts = load_facts(source, trust_remote_code=config.model.trust_remote_code)
    rate = config.learning.learning_rate
    if rate is None:
        parameters = count_parameters(source, config.learning.rank) or parameters_in_name(
            config.model.name
        )
        if parameters is None:
            raise RunError(
                f"learning.learning_rate: is missing, and nothing tells how large {model} is, "
                "which its default depends on; give it"
            )
        rate = default_learning_rate(parameters)
    failures = _tinker_failures()
    try:
        service = ServiceClient(backend="tinker", base_url=config.tinker.base_url, folder=folder)
        served = {one.model_name: one for one in service.get_server_capabilities().supported_models}
        clients = {
            name: service.create_lora_training_client(
                config.model.name, config.learning.rank, config.run.seed + index, name=name
            )
            for index, name in enumerate(adapters)
        }
    except (ValueError, *failures) as error:
        raise RunError(f"run.backend: Tinker refuses to train {model}: {error}") from error
    of_server = (
        served[config.model.name].max_context_length if config.model.name in served else None
    )
    context_length = min(facts.context_length, of_server or facts.context_length)
    return Trained(service, clients, context_length, rate, failures)


def _tinker_failures() -> tuple[type[Exception], ...]:
    import tinker

    return (tinker.TinkerError, ConnectionError)
