"""``agentrl sft``, ``prefer`` and ``reward-model``: train on examples that are there already."""

from __future__ import annotations

from agentrl.cli import Tokens
from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig, SftConfig
from agentrl.config.loading import load, resume_of
from agentrl.timing import heavy_imports


def sft_command(*tokens: Tokens) -> None:
    """Train a LoRA adapter on chats, or on the good rollouts of a run.

    The examples come from files of chats, from a run of this machine, or from the calls that
    `agentrl serve` recorded. Rollouts and calls train as the exact tokens that were recorded; chats
    are written by the model's chat template, as the gateway writes them. The result is a run like
    any other: `agentrl eval` and `agentrl serve` take its folder as --adapter-path.
    """
    _train(SftConfig, tokens)


def prefer_command(*tokens: Tokens) -> None:
    """Train a LoRA adapter on pairs of answers, one of which is preferred: DPO and its relatives.

    The pairs come from files, or from a run: the best rollout of each group against its worst, by
    reward or by people's feedback. The result is a run like any other: `agentrl eval` and `agentrl
    serve` take its folder as --adapter-path.
    """
    _train(PreferConfig, tokens)


def reward_model_command(*tokens: Tokens) -> None:
    """Train a reward model: a LoRA adapter with a head that gives a conversation a number.

    It learns from pairs of answers, or with --loss regression from scored answers; both come from
    files or from a run. A training takes it as a reward with --rewards model:RUN; `agentrl export`
    writes it in the form of transformers' AutoModelForSequenceClassification.
    """
    _train(RewardModelConfig, tokens)


def _train(command: type[OfflineConfig], tokens: tuple[Tokens, ...]) -> None:
    config, resume = load(command, tokens), resume_of(tokens, command.kind)
    with heavy_imports():
        from agentrl.offline.command import run_offline

    run_offline(config, resume)
