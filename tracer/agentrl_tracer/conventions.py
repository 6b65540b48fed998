"""Names of spans, attributes, headers and keys, as they are sent and stored.

They are written out because the semantic-conventions package pins its users.
"""

REWARD_SPAN = "agentrl.reward"
REWARD_NAME = "reward"

NOTE_SPAN = "agentrl.note"
NOTE_NAME = "agentrl.note.name"
NOTE_DATA = "agentrl.note.data"  # JSON
UNFINISHED = "agentrl.unfinished"  # the rollout ended before the span did

UNDELIVERED_SPAN = "agentrl.undelivered"  # a model call raised in the agent, or was canceled
REQUEST_ID = "agentrl.request.id"

EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_VALUE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
RESPONSE_ID = "gen_ai.response.id"
AGENT_NAME = "gen_ai.agent.name"
TOOL_NAME = "gen_ai.tool.name"
OUTPUT = "agentrl.output"  # on the root span: what the agent's function returned

ROLLOUT_HEADER = "x-agentrl-rollout"
"""The attempt's key. It identifies the caller where rollouts share a base URL and an API key."""
REQUEST_HEADER = "x-agentrl-request"
"""An id of the request, by which the agent's process reports that it did not get the answer."""
AGENT_HEADER = "x-agentrl-agent"
"""The agent (role) that makes the call, as percent-encoded UTF-8."""

SCORED = "scored:"
"""``Reward.key`` of a reward that a function computed after the rollout: ``scored:FUNCTION:NAME``.
"""
ASIDE = "aside:"
"""Stands before the ``Reward.key`` of what a re-score keeps, but does not count."""


def agent_of_reward(name: str | None) -> str | None:
    """Return an agent's name as its calls have it: without line breaks and outer spaces."""
    return " ".join(name.split()) or None if name else None
