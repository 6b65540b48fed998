"""How traces become weight updates: trajectories, advantages, losses, LoRA."""
