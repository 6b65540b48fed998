"""How traces become weight updates: trajectories, advantages, losses, LoRA."""

import logging

# PEFT imports it wherever it is installed, and on a CPU it then warns of a kernel it does without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
