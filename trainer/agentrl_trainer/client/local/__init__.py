"""The local backend: the learner and the embedded sampler of this process.

    service     what ``ServiceClient`` asks for: base models by name, checkpoints of all adapters
    base        one base model, its learner, its sampler, and the thread on which it learns
    training    one adapter in training
    sampling    one set of weights to sample with
    states      what ``save_state`` wrote, read again

Every base model has one thread, on which everything happens that touches its learner, in order;
sampling has the engine's thread and a copy of the base of its own.
"""

from agentrl_trainer.client.local.service import LocalService

__all__ = ["LocalService"]
