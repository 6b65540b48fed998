"""The names on the wire, written out: the semantic-conventions package would pin its users."""

REWARD_SPAN = "agentrl.reward"
REWARD_NAME = "reward"

NOTE_SPAN = "agentrl.note"
NOTE_NAME = "agentrl.note.name"
NOTE_DATA = "agentrl.note.data"  # JSON
UNFINISHED = "agentrl.unfinished"  # the rollout ended first

EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_VALUE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
RESPONSE_ID = "gen_ai.response.id"
AGENT_NAME = "gen_ai.agent.name"
OUTPUT = "agentrl.output"
"""What the agent's function returned, on the root span."""

ROLLOUT_HEADER = "x-agentrl-rollout"
"""Carries the attempt's key. In a process that several rollouts share, base URL and API key are
the process's: only a header, set where the call is made, tells whose it is."""
AGENT_HEADER = "x-agentrl-agent"
"""Which agent (role) makes the call; percent-encoded UTF-8."""
