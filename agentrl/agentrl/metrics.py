"""The names of the metrics that more than one module reads."""

REWARD = "reward/mean"
HELD_OUT = "eval/accuracy"
HELD_OUT_REWARD = "eval/reward"
DIFFERENCE = "sampler_trainer/max_logprob_difference"
