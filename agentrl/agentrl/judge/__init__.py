"""Judges: models that reward rollouts, for ``--rewards file.py:judge``.

The file holds one::

    from agentrl.judge import Relative

    judge = Relative("judge", "An answer is good if it is correct, then if it is short.")

``"judge"`` is a model of the ``[models]`` table; it may be the base model or an adapter of the run
(``policy``) as well. Requests go through the run's gateway, which records them; they belong to no
rollout and never train. Each judged attempt gets a note ``judge.NAME`` with its score, the
explanation, and the ids of the calls.
"""

from agentrl.judge.judges import Pairwise, Panel, Relative, Rubric

__all__ = ["Pairwise", "Panel", "Relative", "Rubric"]
