"""The names of the metrics that more than one module reads. All of them: docs/metrics.md."""

REWARD = "reward/mean"
HELD_OUT = "eval/accuracy"
LOSS = "loss"
WENT_BACK = "went_back_from"
HELD_OUT_LOSS = "eval/loss"
DIFFERENCE = "sampler_trainer/max_logprob_difference"
