"""The clients over the official SDK, for Tinker itself or a server that speaks its protocol.

    service     sessions, models by name, checkpoints that hold the paths of states on Tinker
    clients     one adapter in training; one set of weights to sample with
    rows        the trainer's own rows over an API without masks and means

The SDK is an optional extra: it is imported when a service is made. It refuses parameters that it
does not know.
"""
