"""Which rollouts run next, and which ones a step takes."""
