"""``agentrl runs``: look at runs, compare them, export what they recorded, prune their folders."""
