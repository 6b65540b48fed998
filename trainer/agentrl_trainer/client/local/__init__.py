"""The local backend: the learner and the embedded sampler in this process.

    service     base models by name, checkpoints of all adapters
    base        one base model: its learner, its sampler, and its training thread
    training    one adapter in training
    sampling    one set of weights to sample with

Everything that touches a base model's learner runs on the base's one thread, in order. Sampling has
the engine's thread and its own copy of the base.
"""
