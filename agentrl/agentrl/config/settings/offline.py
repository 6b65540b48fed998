"""Training on examples that are there already: passes, held-out measures, the run folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from agentrl.config.field_types import Count, Table
from agentrl.config.settings.learning import LearningSettings
from agentrl.config.settings.run import RunFolderSettings
from agentrl_trainer.names import check_name


class OfflineLearningSettings(LearningSettings):
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls over the steps of the run."""
    epochs: Count = 3
    """Passes over the examples."""
    batch_size: Count = 32
    """Examples of an optimizer step."""


class OfflineEvaluationSettings(Table):
    """Measures of held-out examples."""

    every: Count = 10
    """Steps between measures of the held-out loss; before the first and after the last too."""
    patience: Count | None = None
    """Stop once so many measures in a row were no better than the best before them."""


class OfflineRunSettings(RunFolderSettings):
    name: Annotated[str, AfterValidator(check_name)] | None = None
    """Name of the run and its folder."""
    checkpoint_every: Count = 10
    """Steps between checkpoints, from which --resume goes on; after the last step too."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""
