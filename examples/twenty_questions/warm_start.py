"""Show the model the form of the simple game: supervised fine-tuning on a clumsy player's games.

    python examples/twenty_questions/warm_start.py
    agentrl export runs/twenty-questions-simple-warm/adapter runs/twenty-questions-simple-base \\
        --merged --model smollm2-135m

The player (`clumsy.py`) asks at random, and three of four times it names what fits the answers. How
to play well is left to the training.
"""

import random
from pathlib import Path

from agent import SMALL_SIMPLE, conversation
from clumsy import game
from cyclopts import run

from agentrl import AdamParams, Datum, ModelInput, ServiceClient


def datum(tokenizer, messages: list[dict[str, str]]) -> Datum:
    """Return a row with weight 1 on the player's questions, 0 on all else."""
    tokens, weights = [], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = tokenizer.apply_chat_template(
                messages[:i], add_generation_prompt=True, return_dict=False
            )
            said = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
            weights += [0.0] * (len(asked) - len(tokens)) + [1.0] * len(said)
            tokens = [*asked, *said]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def main(
    games: int = 6400,
    batch: int = 32,
    learning_rate: float = 1e-3,
    folder: Path = Path("runs/twenty-questions-simple-warm"),
) -> None:
    """Write the adapter to FOLDER/adapter.

    Args:
        games: of which each is one row.
    """
    rng = random.Random(0)
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client("smollm2-135m", rank=32, seed=0)
        tokenizer = client.get_tokenizer()
        for _ in range(games // batch):
            played = [conversation(SMALL_SIMPLE, game(rng, simple=True))[:-1] for _ in range(batch)]
            data = [datum(tokenizer, messages) for messages in played]
            tokens = sum(sum(one.loss_fn_inputs["weights"]) for one in data)
            done = client.forward_backward(data, "cross_entropy", normalize_by=tokens)
            client.optim_step(AdamParams(learning_rate=learning_rate))
            print(f"loss per token {done.result().metrics['loss:sum']:.3f}", flush=True)
        client.save_weights_for_sampler(folder / "adapter")


if __name__ == "__main__":
    run(main)
