"""Rewards that are computed from a rollout's trace after it has finished."""
