"""Record what happens in a run: rollouts, attempts, calls, spans and rewards, and their store."""
