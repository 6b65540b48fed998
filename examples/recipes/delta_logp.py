"""Learn to reason without a verifier: reward reasoning that makes a reference answer likelier.

    python examples/recipes/delta_logp.py

The model writes its reasoning first. With the reference answer a,

    reward = log p(a | question, reasoning) - log p(a | question) - penalty * len(reasoning)

The log-probs are those of the initial model, which does not change during training. The estimator
is GRPO without the division by the standard deviation (arXiv:2503.20783): an advantage is the
reward minus the mean of its group.
"""

from pathlib import Path
from statistics import fmean

from common import HELD_OUT, MODEL, answer, numbers, question, report, say
from cyclopts import run

from agentrl import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient


class Judge:
    """Compute rewards with a model that is not trained."""

    def __init__(self, model: SamplingClient, penalty: float) -> None:
        self.model = model
        self.penalty = penalty
        self.tokenizer = model.get_tokenizer()

    def improvements(self, number: int, thoughts: list[list[int]]) -> list[float]:
        """Return by how much each reasoning raises the log-prob of the reference answer."""
        asked, reference = question(self.tokenizer, number), self.reference(number)
        given = [[], *(self.open(thought) for thought in thoughts)]
        rows = [[*asked, *thought, *reference] for thought in given]
        scores = self.model.compute_logprobs_batch(rows).result()
        without, *helped = [sum(score[-len(reference) :]) for score in scores]
        return [value - without for value in helped]

    def rewards(self, improvements: list[float], thoughts: list[list[int]]) -> list[float]:
        return [
            gain - self.penalty * len(thought)
            for gain, thought in zip(improvements, thoughts, strict=True)
        ]

    def reference(self, number: int) -> list[int]:
        return answer(self.tokenizer, f"I am {number}.")

    def open(self, thought: list[int]) -> list[int]:
        """Remove the end token, so that the answer follows the reasoning in the same turn."""
        said = [token for token in thought if token != self.tokenizer.eos_token_id]
        return said + self.tokenizer.encode(" ")


def main(
    steps: int = 20,
    batch: int = 8,
    group: int = 8,
    penalty: float = 0.1,
    learning_rate: float = 2e-3,
    folder: Path = Path("runs/recipes/delta_logp"),
) -> None:
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client(MODEL, rank=16, seed=0)
        judge = Judge(service.create_sampling_client(base_model=MODEL), penalty)
        policy = client.save_weights_and_get_sampling_client()
        before = say(policy)
        client.log({"held-out improvement": held_out_improvement(policy, judge)}, step=0)
        for step in range(1, steps + 1):
            asked = numbers(step, batch)
            prompts = [question(judge.tokenizer, number) for number in asked]
            how = SamplingParams(max_tokens=24, seed=step)
            replies = policy.sample_batch(prompts, group, how).result()
            data, gains, rewards, lengths = [], [], [], []
            for number, prompt, reply in zip(asked, prompts, replies, strict=True):
                thoughts = [sequence.tokens for sequence in reply.sequences]
                improved = judge.improvements(number, thoughts)
                earned = judge.rewards(improved, thoughts)
                for sequence, reward in zip(reply.sequences, earned, strict=True):
                    data.append(datum(prompt, sequence, reward - fmean(earned)))
                gains += improved
                rewards += earned
                lengths += map(len, thoughts)
            client.forward_backward(data, "importance_sampling", normalize_by=None)
            client.optim_step(AdamParams(learning_rate=learning_rate))
            policy = client.save_weights_and_get_sampling_client()
            means = {"reward": rewards, "improvement of log p": gains, "length": lengths}
            client.log({name: fmean(values) for name, values in means.items()}, step=step)
        client.log({"held-out improvement": held_out_improvement(policy, judge)}, step=steps)
        report(client, "Improvement of log p, minus length", before, say(policy))


def datum(prompt, sequence, advantage: float) -> Datum:
    row, context = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": row[1:],
        "logprobs": context + sequence.logprobs,
        "advantages": context + [advantage] * len(sequence.tokens),
    }
    return Datum(ModelInput.from_ints(row[:-1]), inputs)


def held_out_improvement(policy: SamplingClient, judge: Judge) -> float:
    """Return the mean improvement by greedy reasoning on the held-out numbers."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    prompts = [question(judge.tokenizer, number) for number in HELD_OUT]
    replies = policy.sample_batch(prompts, 1, greedy).result()
    return fmean(
        judge.improvements(number, [reply.sequences[0].tokens])[0]
        for number, reply in zip(HELD_OUT, replies, strict=True)
    )


if __name__ == "__main__":
    run(main)
