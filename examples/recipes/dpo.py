"""Direct preference optimization (arXiv:2305.18290): learn which of two answers is better.

    python examples/recipes/dpo.py

The loss of a pair is -log sigmoid(beta * (margin of the policy - margin of the reference)), where a
margin is the log-prob of the chosen answer minus that of the rejected one. The loss is not built
in: ``forward_backward_custom`` differentiates any function of the log-probs.
"""

from pathlib import Path

import torch
from common import MODEL, answer, held_out_accuracy, numbers, question, report, say
from cyclopts import run
from torch.nn.functional import logsigmoid

from agentrl import AdamParams, Datum, ModelInput, SamplingClient, ServiceClient


def pairs(tokenizer, step: int, count: int) -> list[Datum]:
    """Return chosen and rejected answers in turn; ``mask`` leaves out the questions."""
    data = []
    for number in numbers(step, count):
        for text in (f"I am {number}.", f"I am Qwen, not {number}."):
            asked, answered = question(tokenizer, number), answer(tokenizer, text)
            row = asked + answered
            inputs = {
                "target_tokens": row[1:],
                "mask": [0] * (len(asked) - 1) + [1] * len(answered),
            }
            data.append(Datum(ModelInput.from_ints(row[:-1]), inputs))
    return data


def answer_logprobs(reference: SamplingClient, data: list[Datum]) -> torch.Tensor:
    """Return the log-prob of each answer under the reference policy, shape [len(data)]."""
    rows = [[*d.model_input.to_ints(), d.loss_fn_inputs["target_tokens"][-1]] for d in data]
    found = reference.compute_logprobs_batch(rows).result()
    return torch.tensor(
        [
            sum(lp for lp, on in zip(row[1:], d.loss_fn_inputs["mask"], strict=True) if on)
            for row, d in zip(found, data, strict=True)
        ]
    )


def dpo_loss(beta: float, reference: torch.Tensor):
    expected = reference[0::2] - reference[1::2]

    def loss(data: list[Datum], logprobs: list[torch.Tensor]):
        policy = torch.stack([row.sum() for row in logprobs])  # 0 where the mask is off
        margin = policy[0::2] - policy[1::2] - expected
        return -logsigmoid(beta * margin).mean(), {"margin": margin.mean().item()}

    return loss


def main(
    steps: int = 15,
    batch: int = 16,
    beta: float = 0.3,
    learning_rate: float = 1e-3,
    folder: Path = Path("runs/recipes/dpo"),
) -> None:
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client(MODEL, rank=16, seed=0)
        reference = service.create_sampling_client(base_model=MODEL)
        tokenizer, before = client.get_tokenizer(), say(reference)
        client.log({"held-out accuracy": held_out_accuracy(reference)}, step=0)
        for step in range(1, steps + 1):
            data = pairs(tokenizer, step, batch)
            loss = dpo_loss(beta, answer_logprobs(reference, data))
            done = client.forward_backward_custom(data, loss)
            client.optim_step(AdamParams(learning_rate=learning_rate))
            metrics = done.result().metrics
            client.log(
                {"loss": metrics["loss:sum"], "margin": metrics["margin"]},
                step=step,
            )
        sampler = client.save_weights_and_get_sampling_client()
        client.log({"held-out accuracy": held_out_accuracy(sampler)}, step=steps)
        report(client, "Direct preference optimization", before, say(sampler))


if __name__ == "__main__":
    run(main)
