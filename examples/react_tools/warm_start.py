"""Show the model the format first: supervised fine-tuning on a few worked problems.

    python examples/react_tools/warm_start.py
    agentrl export runs/react-tools-warm/adapter runs/react-tools-base --merged --model smollm2-135m

`train.toml` then trains the merged model. The problems are the first of the training set.
"""

import json
from pathlib import Path

from agent import EXAMPLE, HERE, calculate
from cyclopts import run

from agentrl import AdamParams, Datum, ModelInput, ServiceClient

THOUGHTS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
ROLES = {"system": "system", "human": "user", "ai": "assistant"}


def conversation(task: dict) -> list[dict[str, str]]:
    """Return the agent's messages for a task, solved as its ``steps`` say."""
    messages = [{"role": ROLES[one.type], "content": one.text} for one in EXAMPLE]
    messages.append({"role": "user", "content": task["question"]})
    for step in task["steps"]:
        thought = THOUGHTS[step.split()[1]]
        action = f"Thought: {thought}.\nAction: calculator[{step}]"
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": f"Observation: {calculate(step)}"})
    answer = f"Thought: done.\nFinal Answer: {task['answer']}"
    return [*messages, {"role": "assistant", "content": answer}]


def datum(tokenizer, messages: list[dict[str, str]]) -> Datum:
    """Return a row with weight 1 on the replies to the task, 0 on all else."""
    tokens, weights = [], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > len(EXAMPLE):
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
    problems: int = 144,
    batch: int = 8,
    learning_rate: float = 1e-3,
    folder: Path = Path("runs/react-tools-warm"),
) -> None:
    lines = (HERE / "train.jsonl").read_text().splitlines()[:problems]
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client("smollm2-135m", rank=32, seed=0)
        tokenizer = client.get_tokenizer()
        data = [datum(tokenizer, conversation(json.loads(line))) for line in lines]
        for start in range(0, len(data), batch):
            rows = data[start : start + batch]
            tokens = sum(sum(row.loss_fn_inputs["weights"]) for row in rows)
            done = client.forward_backward(rows, "cross_entropy", normalize_by=tokens)
            client.optim_step(AdamParams(learning_rate=learning_rate))
            print(f"loss per token {done.result().metrics['loss:sum']:.3f}")
        client.save_weights_for_sampler(folder / "adapter")


if __name__ == "__main__":
    run(main)
