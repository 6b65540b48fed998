"""What runs in an agent's own process, and how that process is prepared."""
