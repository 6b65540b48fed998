"""``agentrl sft``: train a LoRA adapter on chats, or on the good rollouts of a run."""

from __future__ import annotations

from functools import partial

from agentrl.cli import Tokens
from agentrl.config.commands import SftConfig
from agentrl.config.loading import load, resume_of


def sft_command(*tokens: Tokens) -> None:
    """Train a LoRA adapter on chats, or on the good rollouts of a run.

    The examples come from files of chats, from a run of this machine, or from the calls that
    `agentrl serve` recorded. Rollouts and calls train as the exact tokens that were recorded; chats
    are written by the model's chat template, as the gateway writes them. The result is a run like
    any other: `agentrl eval` and `agentrl serve` take its folder as --adapter-path.
    """
    config, resume = load(SftConfig, tokens), resume_of(tokens, "sft")
    from agentrl.offline.command import run_offline
    from agentrl.offline.sft import prepare

    run_offline(config, resume, "sft", partial(prepare, config))
