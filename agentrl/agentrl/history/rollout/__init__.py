"""What is recorded of one rollout: its trace, its conversations, its tokens. Knows no HTML."""
