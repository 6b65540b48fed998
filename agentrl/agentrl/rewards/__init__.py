"""Ready rewards for ``--rewards``: each makes a function of a finished rollout's trace.

With their defaults they can be named directly, ``--rewards agentrl.rewards:exact``; else in a file
of your own, ``--rewards my_rewards.py:score``::

    from agentrl.rewards import length, numeric, weighted

    score = weighted(correct=(1.0, numeric(field="answer")), short=(0.1, length(400)))

An error in a task, such as a missing field, gives no reward and is counted. Importing this package
loads no torch.
"""

from agentrl.rewards.mathematics import symbolic
from agentrl.rewards.text import code_tests, exact, format_tags, json_schema, length, numeric, regex
from agentrl.scoring.functions import group_reward, weighted
from agentrl.scoring.trace import Trace

__all__ = [
    "Trace",
    "code_tests",
    "exact",
    "format_tags",
    "group_reward",
    "json_schema",
    "length",
    "numeric",
    "regex",
    "symbolic",
    "weighted",
]
