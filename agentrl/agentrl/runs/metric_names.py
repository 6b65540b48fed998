"""The names of the metrics that more than one module reads. All of them: docs/metrics.md."""

REWARD = "reward/mean"
HELD_OUT = "eval/accuracy"
DIFFERENCE = "sampler_trainer/max_logprob_difference"
