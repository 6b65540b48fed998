"""Start the adapters of a run from saved weights: ``learning.init_adapter``.

What a run starts from is copied into its folder, so that it is resumed without its source. Loads
torch only to make clients.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import flag_of
from agentrl.config.settings.learning import LearningSettings
from agentrl.runs.best_adapter import best_step, held_out_of
from agentrl.runs.folder import RunFolder, find_adapters, named_adapters, run_and_step
from agentrl_trainer.models.saved_lora import CONFIG_FILE, WEIGHTS_FILE, SavedLora, read_lora
from agentrl_trainer.models.sources import ModelError, resolve_model

if TYPE_CHECKING:
    from agentrl_trainer.client import ServiceClient, TrainingClient
    from agentrl_trainer.learner.learner import Learner

_FIELD = "learning.init_adapter"
_ADAPTERS, _CHECKPOINTS = "adapters", "checkpoints"  # in the run's folder ``initial``


@dataclass(frozen=True, slots=True)
class InitialAdapters:
    """What the adapters of a new run start from."""

    loras: dict[str, SavedLora]
    """By the names that the adapters have in the new run."""
    checkpoint: Path | None
    """Of their optimizers, which are taken too."""
    notes: list[str]

    @property
    def told(self) -> str:
        """Say what the run starts from."""
        where = sorted({str(lora.folder) for lora in self.loras.values()})
        said = f"starts from {', '.join(where)}"
        said += ", optimizer included" if self.checkpoint else ""
        return "; ".join([said, *self.notes])

    def keep(self, folder: RunFolder) -> None:
        """Copy it into the folder of the run."""
        for name, lora in self.loras.items():
            kept = folder.initial / _ADAPTERS / name
            kept.mkdir(parents=True, exist_ok=True)
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copy(lora.folder / file, kept / file)
        if (checkpoint := self.checkpoint) is not None:
            kept = folder.initial / _CHECKPOINTS / checkpoint.name
            shutil.copytree(checkpoint, kept, dirs_exist_ok=True)


def find_initial(
    learning: LearningSettings, names: Sequence[str], model: str
) -> InitialAdapters | None:
    """Find what a new run starts from, and make its rank and alpha those of ``learning``.

    Args:
        names: of the adapters of the run.
        model: the base model.

    Raises:
        ConfigError: there is no such adapter, it cannot be trained here, or its rank or alpha is
            not the one that is set.
    """
    source = learning.init_adapter
    if source is None:
        return None
    folders = named_adapters(source, find_adapters(source, _FIELD), names, _FIELD)
    try:
        loras = {name: read_lora(folder) for name, folder in folders.items()}
    except ModelError as error:
        raise ConfigError(f"{_FIELD}: {error}") from error
    for lora in loras.values():
        for key in ("rank", "alpha"):
            given, own = getattr(learning, key), getattr(lora, key)
            if key in learning.model_fields_set and given != own:
                raise ConfigError(
                    f"learning.{key}: {given:g} differs from the {own:g} of {lora.folder}, which "
                    f"{flag_of(_FIELD)} starts from; leave it out"
                )
    learning.rank = max(lora.rank for lora in loras.values())
    learning.alpha = next(iter(loras.values())).alpha
    checkpoint = _checkpoint(source, folders) if learning.init_optimizer else None
    notes = [f"{name}: {note}" for name, lora in loras.items() for note in lora.notes]
    bases = {lora.base for lora in loras.values()} - {None, model, resolve_model(model)}
    notes += [f"{source} was trained over {base}, and goes on over {model}" for base in bases]
    return InitialAdapters(loras, checkpoint, notes)


def _checkpoint(source: Path, folders: Mapping[str, Path]) -> Path:
    """Return the checkpoint of the step that a run's adapters are of."""
    run, step = run_and_step(source)
    if not run.config.is_file():
        raise ConfigError(
            f"learning.init_optimizer: {str(source)!r} is no run; an adapter alone has no "
            "optimizer. Leave it out"
        )
    version = next(iter(folders.values())).name.removeprefix("v")
    at = best_step(held_out_of(run)) if step == "best" else int(version)
    checkpoint = run.checkpoints / f"step-{at:08d}"
    if not checkpoint.is_dir():
        kept = ", ".join(str(int(one.name[5:])) for one in sorted(run.checkpoints.glob("step-*")))
        raise ConfigError(
            f"learning.init_optimizer: {run.root} has no checkpoint of step {at}; kept are those "
            f"of: {kept or 'none'}. Give one of them as RUN@STEP, or leave it out"
        )
    return checkpoint


def initial_adapter(folder: RunFolder, name: str) -> Path | None:
    """Return the copy of what an adapter of the run started from; None: it was fresh."""
    kept = folder.initial / _ADAPTERS / name
    return kept if kept.is_dir() else None


def create_adapters(
    service: ServiceClient,
    model: str,
    learning: LearningSettings,
    names: Sequence[str],
    seed: int,
    folder: Path,
) -> dict[str, TrainingClient]:
    """Make a client for each adapter: fresh, with seeds of their own, or what the run starts from.

    Args:
        folder: of the run.

    Raises:
        ConfigError: what it starts from does not fit the model.
    """
    initial = RunFolder(folder).initial
    clients: dict[str, TrainingClient] = {}
    for index, name in enumerate(names):
        create, at = service.create_lora_training_client, seed + index
        if not initial.is_dir():
            clients[name] = create(model, learning.rank, at, name=name, alpha=learning.alpha)
            continue
        lora = read_lora(initial / _ADAPTERS / name)
        try:
            clients[name] = create(
                model, lora.rank, at, name=name, alpha=lora.alpha, targets=lora.targets
            )
        except ValueError as error:
            raise ConfigError(
                f"{_FIELD}: the adapter does not fit {model!r}, by its layers: {error}"
            ) from error
    if initial.is_dir():
        load_initial(clients, initial)
    return clients


def load_initial(clients: Mapping[str, TrainingClient], initial: Path) -> None:
    """Load into fresh adapters, made alike, the weights and optimizers kept in ``initial``.

    Raises:
        ConfigError: the weights do not fit, or the checkpoint is damaged.
    """
    from agentrl_trainer.checkpoint import latest_checkpoint
    from agentrl_trainer.client.local_base import tensors_of
    from agentrl_trainer.models.lora import load_adapter_weights

    found = latest_checkpoint(initial / _CHECKPOINTS)
    if found.torn:
        raise ConfigError(f"learning.init_optimizer: {'; '.join(found.torn.values())}")

    def load(learner: Learner, name: str) -> None:
        folder = initial / _ADAPTERS / name
        load_adapter_weights(learner.model, name, folder)
        if found.checkpoint is None:
            return
        owners = {key.split("/")[1] for key in found.checkpoint.tensors}
        adapters = {owner for owner in owners if "." not in owner}
        source = name if name in adapters else adapters.pop()
        state = tensors_of(
            replace(found.checkpoint, meta={"adapter": source}), name, optimizer=True
        )
        # The source may have had a value function that is not here, or the other way round.
        known = {key: x for key, x in state.items() if key.split("/")[1] in learner.parameters}
        learner.load_state_dict({**learner.state_dict([name]), **known}, [name])

    for name, client in clients.items():
        try:
            client.local(lambda learner, name=name: load(learner, name)).result()
        except ValueError as error:
            raise ConfigError(f"{_FIELD}: {error}") from error
