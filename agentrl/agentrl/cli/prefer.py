"""``agentrl prefer``: train a LoRA adapter on pairs of answers."""

from __future__ import annotations

from functools import partial

from agentrl.cli import Tokens
from agentrl.config.commands import PreferConfig
from agentrl.config.loading import load, resume_of


def prefer_command(*tokens: Tokens) -> None:
    """Train a LoRA adapter on pairs of answers, one of which is preferred: DPO and its relatives.

    The pairs come from files, or from a run: the best rollout of each group against its worst, by
    reward or by people's feedback. The result is a run like any other: `agentrl eval` and `agentrl
    serve` take its folder as --adapter-path.
    """
    config, resume = load(PreferConfig, tokens), resume_of(tokens, "prefer")
    from agentrl.offline.command import run_offline
    from agentrl.offline.prefer import prepare

    run_offline(config, resume, "prefer", partial(prepare, config))
