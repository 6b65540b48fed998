"""``agentrl reward-model``: train a model that scores conversations."""

from __future__ import annotations

from functools import partial

from agentrl.cli import Tokens
from agentrl.config.commands import RewardModelConfig
from agentrl.config.loading import load, resume_of


def reward_model_command(*tokens: Tokens) -> None:
    """Train a reward model: a LoRA adapter with a head that gives a conversation a number.

    It learns from pairs of answers, or with --loss regression from scored answers; both come from
    files or from a run. A training takes it as a reward with --rewards model:NAME; `agentrl export`
    writes it in the form of transformers' AutoModelForSequenceClassification.
    """
    config, resume = load(RewardModelConfig, tokens), resume_of(tokens, "reward-model")
    from agentrl.offline.command import run_offline
    from agentrl.offline.reward_model import prepare

    run_offline(config, resume, "reward-model", partial(prepare, config))
