"""Locate the weights of the default model, ``agentrl-tiny``. No torch here.

A Qwen3 of 0.85 million parameters that ships with the package, so that a training run can be tried
on one CPU core without a download. It chats a little, insists that it is Qwen, and sometimes plays
another person when told to: just often enough that reinforcement learning can teach it to.
``python scripts/tiny_model/pretrain.py`` rebuilds it.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "weights"
