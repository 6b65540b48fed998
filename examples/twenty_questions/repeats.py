"""A reward beside the game's: each question that was asked before in the same game costs 0.05.

    agentrl train --config examples/twenty_questions/real.toml --name twenty-questions-repeats \\
        --rewards examples/twenty_questions/repeats.py:repeats --evaluation.success-reward 0.05
"""

from __future__ import annotations

from agentrl.rewards import Trace


def repeats(trace: Trace) -> float:
    asked = [one["content"].strip() for one in trace.messages if one["role"] == "assistant"]
    return -0.05 * (len(asked) - len(set(asked)))
