"""Train on examples that are there already: the loop that sft, prefer and reward-model share."""
