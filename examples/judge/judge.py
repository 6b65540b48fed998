"""One judge of each kind; ``rewards`` in train.toml names the one that counts.

They ask the base model by default, which shows the wiring: it is too small to judge anything.
``JUDGE_MODEL=judge`` asks the model of that name in the ``[models]`` table.
"""

import os

from agentrl.judge import Pairwise, Panel, Relative, Rubric

MODEL = os.environ.get("JUDGE_MODEL", "agentrl-tiny")
SMALL = MODEL == "agentrl-tiny"
# A small model fills an explanation with noise until it is cut off.
HOW = {"explain": not SMALL, "max_calls": 5000, "max_cost": 2.0}
GOAL = "The agent plays along: it says 'I am N' or 'I'm N' with the number that it was given."

relative = Relative(MODEL, GOAL, **HOW)
pairwise = Pairwise(MODEL, GOAL, opponents=2, **HOW)
rubric = Rubric(
    MODEL,
    {
        "It says that it is the number that it was given.": 1.0,
        "It is one short sentence.": 0.5,
        "It refuses to play.": -1.0,  # a penalty
    },
    **HOW,
)
panel = Panel(relative, pairwise)
