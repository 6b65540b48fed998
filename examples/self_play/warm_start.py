"""Show the model the rules: supervised fine-tuning on random legal moves of both games.

    python examples/self_play/warm_start.py
    agentrl export runs/self-play-warm/adapter runs/self-play-base --merged --model agentrl-tiny

How to win is left to the training.
"""

import random
from pathlib import Path

import guess
import nim
from cyclopts import run

from agentrl import AdamParams, Datum, ModelInput, ServiceClient


def example(tokenizer, rng: random.Random) -> Datum:
    """Return a random position with a random legal move, which alone has weight."""
    pile, low = rng.randint(1, 9), rng.randint(1, guess.LAST)
    high = rng.randint(low, guess.LAST)
    of_nim = nim.question(pile), nim.legal(pile)
    asked, legal = rng.choice([of_nim, (guess.question(low, high), guess.possible(low, high))])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
    )
    said = [*tokenizer.encode(rng.choice(legal), add_special_tokens=False), tokenizer.eos_token_id]
    tokens, weights = [*prompt, *said], [0.0] * len(prompt) + [1.0] * len(said)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def main(steps: int = 60, batch: int = 64, learning_rate: float = 3e-3) -> None:
    rng, folder = random.Random(0), Path("runs/self-play-warm")
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client("agentrl-tiny", rank=32, seed=0)
        tokenizer = client.get_tokenizer()
        for step in range(1, steps + 1):
            data = [example(tokenizer, rng) for _ in range(batch)]
            done = client.forward_backward(data, "cross_entropy", normalize_by=None)
            client.optim_step(AdamParams(learning_rate * (1 - step / (steps + 1)))).result()
            if step % 20 == 0:
                print(f"{step}: loss {done.result().metrics['loss:sum']:.3f}")
        client.save_weights_for_sampler(folder / "adapter").result()


if __name__ == "__main__":
    run(main)
