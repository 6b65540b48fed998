"""The names of the metrics that more than one module reads. All of them: docs/metrics.md."""

REWARD = "reward/mean"
HELD_OUT = "eval/accuracy"
HELD_OUT_REWARD = "eval/reward"
DIFFERENCE = "sampler_trainer/max_logprob_difference"
LAST_EPOCH = "last_epoch/"
"""Before the names of what the last epoch saw, where there are several."""
OPTIONAL = {
    "kl_reference": "kl/reference",
    "correction": "correction/weight",
    "dropped": "correction/cut",
    "value_loss": "value/loss",
    "value_error": "value/error",
}
"""The learner's name of what not every step has, and the metric's."""
