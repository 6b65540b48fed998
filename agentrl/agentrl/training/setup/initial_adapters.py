"""Start the adapters of a run from saved weights: ``learning.init_adapter``.

What a run starts from is copied into its folder, so that it is resumed without its source. Loads
torch only to make clients.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import flag_of
from agentrl.config.settings.learning import LearningSettings
from agentrl.console.output import print_line
from agentrl.runs.folder import RunFolder, find_adapters, named_adapters, run_and_step
from agentrl.training.resume import checkpoint_of
from agentrl_trainer.models.saved_lora import CONFIG_FILE, WEIGHTS_FILE, SavedLora, read_lora
from agentrl_trainer.models.sources import ModelError

if TYPE_CHECKING:
    from agentrl.config.settings.run import NewRunSettings
    from agentrl_trainer.client import ServiceClient, TrainingClient
    from agentrl_trainer.learner.learner import Learner

_FIELD = "learning.init_adapter"


def new_run(
    where: NewRunSettings, kind: str, learning: LearningSettings, names: Sequence[str]
) -> RunFolder:
    """Make the folder of a new run, with copies of what its adapters start from.

    Raises:
        ConfigError: as ``find_initial``; the name is taken; or no such optimizer is kept.
    """
    loras, checkpoint = find_initial(learning, names), None
    if loras and learning.init_optimizer:
        run, step = run_and_step(str(learning.init_adapter))
        newest = next(iter(loras.values())).folder.name.removeprefix("v")
        checkpoint = checkpoint_of(run, step or newest, "learning.init_optimizer")
    folder = RunFolder.create(where.folder, where.name, kind)
    for name, lora in loras.items():
        kept = initial_adapter(folder, name)
        kept.mkdir(parents=True, exist_ok=True)
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copy(lora.folder / file, kept / file)
        said = "; ".join([f"starts from {lora.folder}, over {lora.base}", *lora.notes])
        print_line((f"{name} {said}", "dim"))
    if checkpoint is not None:
        kept = folder.initial / "checkpoints" / checkpoint.name
        shutil.copytree(checkpoint, kept, dirs_exist_ok=True)
        print_line((f"its optimizer is that of {checkpoint}", "dim"))
    return folder


def find_initial(learning: LearningSettings, names: Sequence[str]) -> dict[str, SavedLora]:
    """Find what new adapters start from, and make its rank and alpha those of ``learning``.

    Args:
        names: of the adapters of the run.

    Returns:
        By these names; empty if they are fresh.

    Raises:
        ConfigError: there is no such adapter, it cannot be trained here, or its rank or alpha is
            not the one that is set.
    """
    source = learning.init_adapter
    if source is None:
        return {}
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
    return loras


def initial_adapter(folder: RunFolder, name: str) -> Path:
    """Return where a run keeps the copy of what an adapter started from, if it was not fresh."""
    return folder.initial / "adapters" / name


def create_adapters(
    service: ServiceClient,
    model: str,
    learning: LearningSettings,
    names: Sequence[str],
    seed: int,
    folder: RunFolder,
) -> dict[str, TrainingClient]:
    """Make a client for each adapter: fresh, with seeds of their own, or what the run starts from.

    Raises:
        ConfigError: what it starts from does not fit the model.
    """
    clients: dict[str, TrainingClient] = {}
    for index, name in enumerate(names):
        kept = initial_adapter(folder, name)
        how: dict[str, Any] = {"rank": learning.rank, "alpha": learning.alpha}
        if kept.is_dir():
            lora = read_lora(kept)
            how = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
        create = service.create_lora_training_client
        try:
            clients[name] = create(model, seed=seed + index, name=name, **how)
            if kept.is_dir():
                load = clients[name].local(lambda learner, name=name: _load(learner, name, folder))
                load.result()
        except ValueError as error:
            if not kept.is_dir():
                raise
            raise ConfigError(f"{_FIELD}: it does not fit {model!r}: {error}") from error
    return clients


def _load(learner: Learner, name: str, folder: RunFolder) -> None:
    """Load the weights, and the optimizer where one is kept, into a fresh adapter made alike."""
    from agentrl_trainer.client.local_base import read_state, tensors_of
    from agentrl_trainer.models.lora import load_adapter_weights

    load_adapter_weights(learner.model, name, initial_adapter(folder, name))
    if (checkpoints := folder.initial / "checkpoints").is_dir():
        state = read_state(checkpoints)
        owners = {key.split("/")[1] for key in state.tensors}
        # That of a single adapter may have had another name; a value function's has a dot.
        source = name if name in owners else next(one for one in owners if "." not in one)
        tensors = tensors_of(replace(state, meta={"adapter": source}), name, optimizer=True)
        learner.load_state_dict(tensors, [name])
