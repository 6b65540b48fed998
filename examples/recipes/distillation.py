"""On-policy distillation: the student samples, the teacher scores each token.

    python examples/recipes/distillation.py

A token's advantage is log p_teacher - log p_student. Importance sampling with it follows the
gradient of the reverse KL divergence KL(student || teacher), token by token, on the student's own
samples (Agarwal et al., arXiv:2306.13649; Thinking Machines, "On-Policy Distillation", 2025). The
teacher is trained first, by supervised fine-tuning: see sft.py.
"""

from pathlib import Path
from statistics import fmean

from common import MODEL, held_out_accuracy, numbers, question, report, say
from cyclopts import run
from sft import fine_tune

from agentrl import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient


def rollouts(
    student: SamplingClient, teacher: SamplingClient, step: int, batch: int, group: int
) -> tuple[list[Datum], float]:
    """Return the student's samples with their advantages, and the mean KL per token."""
    tokenizer = student.get_tokenizer()
    prompts = [question(tokenizer, number) for number in numbers(step, batch)]
    replies = student.sample_batch(prompts, group, SamplingParams(max_tokens=16, seed=step))
    said = [
        (prompt, sequence)
        for prompt, reply in zip(prompts, replies.result(), strict=True)
        for sequence in reply.sequences
    ]
    scores = teacher.compute_logprobs_batch([prompt + s.tokens for prompt, s in said]).result()
    data, divergence = [], []
    for (prompt, sequence), score in zip(said, scores, strict=True):
        row, context = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
        taught = [
            teachers - students
            for teachers, students in zip(score[len(prompt) :], sequence.logprobs, strict=True)
        ]
        divergence += [-value for value in taught]
        inputs = {
            "target_tokens": row[1:],
            "logprobs": context + sequence.logprobs,
            "advantages": context + taught,
        }
        data.append(Datum(ModelInput.from_ints(row[:-1]), inputs))
    return data, fmean(divergence)


def main(
    steps: int = 20,
    batch: int = 8,
    group: int = 4,
    teacher_steps: int = 20,
    learning_rate: float = 3e-3,
    folder: Path = Path("runs/recipes/distillation"),
) -> None:
    with ServiceClient(folder=folder) as service:
        # Two adapters over one base.
        tutor = service.create_lora_training_client(MODEL, rank=16, seed=1, name="teacher")
        fine_tune(tutor, teacher_steps, 32, 3e-3)
        teacher = tutor.save_weights_and_get_sampling_client()
        client = service.create_lora_training_client(MODEL, rank=8, seed=0, name="student")
        student = client.save_weights_and_get_sampling_client()
        before = say(student)
        client.log({"held-out accuracy": held_out_accuracy(student)}, step=0)
        for step in range(1, steps + 1):
            data, divergence = rollouts(student, teacher, step, batch, group)
            client.forward_backward(data, "importance_sampling", normalize_by=None)
            client.optim_step(AdamParams(learning_rate=learning_rate))
            student = client.save_weights_and_get_sampling_client()
            client.log({"KL to the teacher": divergence}, step=step)
        client.log({"held-out accuracy": held_out_accuracy(student)}, step=steps)
        report(client, "On-policy distillation", before, say(student))


if __name__ == "__main__":
    run(main)
