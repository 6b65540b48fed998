"""What happened in a run: rollouts, attempts, calls, spans, rewards, and where they are kept."""
