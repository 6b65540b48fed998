"""Supervised fine-tuning on good answers.

    python examples/recipes/sft.py

The loss is the cross-entropy of the answer tokens; question tokens have weight 0.
"""

from pathlib import Path

from common import MODEL, answer, held_out_accuracy, numbers, question, report, say
from cyclopts import run

from agentrl import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient


def example(tokenizer, number: int) -> Datum:
    asked, answered = question(tokenizer, number), answer(tokenizer, f"I am {number}.")
    row = asked + answered
    return Datum(
        model_input=ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": row[1:],
            "weights": [0.0] * (len(asked) - 1) + [1.0] * len(answered),
        },
    )


def fine_tune(client: TrainingClient, steps: int, batch: int, learning_rate: float) -> None:
    tokenizer = client.get_tokenizer()
    for step in range(1, steps + 1):
        data = [example(tokenizer, number) for number in numbers(step, batch)]
        tokens = sum(sum(datum.loss_fn_inputs["weights"]) for datum in data)
        # Both operations are queued before either result is awaited.
        done = client.forward_backward(data, "cross_entropy", normalize_by=tokens)
        client.optim_step(AdamParams(learning_rate=learning_rate * (1 - (step - 1) / steps)))
        client.log({"loss per token": done.result().metrics["loss:sum"]}, step=step)


def main(
    steps: int = 20,
    batch: int = 32,
    learning_rate: float = 3e-3,
    folder: Path = Path("runs/recipes/sft"),
) -> None:
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client(MODEL, rank=16, seed=0)
        sampler = client.save_weights_and_get_sampling_client()
        accuracy, before = held_out_accuracy(sampler), say(sampler)
        client.log({"held-out accuracy": accuracy}, step=0)
        fine_tune(client, steps, batch, learning_rate)
        sampler = client.save_weights_and_get_sampling_client()
        client.log({"held-out accuracy": held_out_accuracy(sampler)}, step=steps)
        client.save_weights_for_sampler("final")
        report(client, "Supervised fine-tuning", before, say(sampler))


if __name__ == "__main__":
    run(main)
