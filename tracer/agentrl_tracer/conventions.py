"""The names on the wire, written out: the semantic-conventions package would pin its users."""

REWARD_SPAN = "agentrl.reward"
REWARD_NAME = "reward"

EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_VALUE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
RESPONSE_ID = "gen_ai.response.id"
AGENT_NAME = "gen_ai.agent.name"
OUTPUT = "agentrl.output"
"""What the agent's function returned, on the root span."""
