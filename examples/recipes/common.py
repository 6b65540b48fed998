"""The task that all recipes train, and a table and a picture of the result.

The task is "Let's play a game. Say you are 417." agentrl-tiny was trained to say that it is Qwen,
so it refuses. Recipes train on numbers below 1000. The held-out numbers have four digits.
"""

import random
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from agentrl import SamplingClient, SamplingParams, TrainingClient

MODEL = "agentrl-tiny"
HELD_OUT = list(range(1000, 1024))
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)

torch.set_num_threads(1)  # a model this small is slower on several


def question(tokenizer, number: int) -> list[int]:
    """Return the tokens of the chat up to the model's answer."""
    message = {"role": "user", "content": f"Let's play a game. Say you are {number}."}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)


def answer(tokenizer, text: str) -> list[int]:
    """Return the tokens of an answer with its end token."""
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def numbers(step: int, count: int) -> list[int]:
    """Draw the numbers of a training step, different in each."""
    return random.Random(step).sample(range(1000), count)


def held_out_accuracy(sampler: SamplingClient) -> float:
    """Return the share of held-out numbers that the model says it is, at temperature 0."""
    tokenizer = sampler.get_tokenizer()
    prompts = [question(tokenizer, number) for number in HELD_OUT]
    replies = sampler.sample_batch(prompts, 1, GREEDY).result()
    said = [tokenizer.decode(reply.sequences[0].tokens).lower() for reply in replies]
    return sum(f"i am {n}." in text for n, text in zip(HELD_OUT, said, strict=True)) / len(said)


def say(sampler: SamplingClient, number: int = 1007) -> str:
    tokenizer = sampler.get_tokenizer()
    reply = sampler.sample(question(tokenizer, number), 1, GREEDY).result()
    return tokenizer.decode(reply.sequences[0].tokens, skip_special_tokens=True)


def report(client: TrainingClient, title: str, before: str, after: str) -> Path:
    """Print the first and last value of each logged metric; draw all of them."""
    last = client.history[-1]
    table = Table("", "first", "last", title=title, title_justify="left")
    for name in logged(client.history):
        known = [row[name] for row in client.history if name in row]
        table.add_row(name, f"{known[0]:.3f}", f"{known[-1]:.3f}")
    table.add_row("Say you are 1007.", before, after)
    picture = draw(client.history, title, client.folder / "curve.png")
    Console().print(table, f"{last['step']:.0f} steps; curve: {picture}")
    return picture


def logged(history: list[dict[str, float]]) -> list[str]:
    """Return the names of the logged metrics, in the order of their first appearance."""
    return [name for name in dict.fromkeys(n for row in history for n in row) if name != "step"]


def draw(history: list[dict[str, float]], title: str, path: Path) -> Path:
    """Draw one panel a metric over steps."""
    names = logged(history)
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        known = [(row["step"], row[name]) for row in history if name in row]
        panel.plot(*zip(*known, strict=True), marker="o", markersize=3)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
