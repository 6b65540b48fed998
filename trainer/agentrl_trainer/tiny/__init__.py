"""The embedded default model, ``agentrl-tiny``.

A Qwen3 of 0.85 million parameters which ships with the package, so that a training run can be
tried on one CPU core without a download. It chats a little, insists that it is Qwen, and now and
then obeys when told to be somebody else: just often enough that reinforcement learning can teach it
to. ``python scripts/tiny_model/pretrain.py`` rebuilds it from nothing: ``corpus`` writes the
chats, ``pretrain`` learns them. This module only knows where the weights lie; it imports no torch.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "weights"

__all__ = ["MODEL_DIR"]
