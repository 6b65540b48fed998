"""Supervised fine-tuning: the cross-entropy of weighted tokens, and where examples come from."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.commands import SftConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line
from agentrl.datasets.chats import to_chat
from agentrl.datasets.files import read_records
from agentrl.datasets.recorded import Sample, run_samples, served_samples
from agentrl.datasets.rendering import chat_rows
from agentrl.datasets.samples import Samples
from agentrl.offline.command import Prepared
from agentrl.offline.examples import train_and_held_out
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.client import AdamParams, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.models.loading import ModelFacts


class Sft:
    """Learns token rows, whose ``advantages`` are the weights of their tokens."""

    name = "sft"

    def update(
        self, client: TrainingClient, examples: Sequence[TrainingRow], adam: AdamParams
    ) -> dict[str, float]:
        added = client.forward_backward(
            list(examples), "cross_entropy", normalize_by=_weight(examples), logprobs=False
        )
        stepped = client.optim_step(adam).result().metrics
        found = added.result().metrics
        return {
            "loss": found["loss:sum"],
            "tokens/trained": found["tokens:sum"],
            "tokens/total": float(sum(len(row.tokens) for row in examples)),
            **stepped,
        }

    def measure(self, client: TrainingClient, examples: Sequence[TrainingRow]) -> dict[str, float]:
        found = client.forward(list(examples), "cross_entropy").result().metrics
        return {"loss": found["loss:sum"] / _weight(examples)}


def _weight(rows: Sequence[TrainingRow]) -> float:
    """Sum the weights of the tokens that train."""
    return sum(sum(row.advantages) for row in rows)


# ---- examples


def prepare(config: SftConfig, facts: ModelFacts) -> Prepared[TrainingRow]:
    """Read the examples and the held-out ones; say how many there are, and what is left out.

    Raises:
        ConfigError: an example cannot be read, or none is left.
    """
    data, renderer = config.data, Renderer(facts.tokenizer)
    longest = min(config.learning.max_length or facts.context_length, facts.context_length)
    if data.from_run is not None:
        last = data.train_on == "last"
        found = run_samples(data.from_run, config.model.name, data.where, data.best_of, last)
    elif data.from_served is not None:
        found = served_samples(data.from_served, data.train_on == "last")
    else:
        found = _of_chats(data.source or "", "data.source", renderer, config)
    train, held_out = train_and_held_out(
        found, data.held_out, longest, config.run.seed,
        lambda source: _of_chats(source, "data.held_out", renderer, config),
    )  # fmt: skip
    _tell("train on", train)
    if held_out:
        _tell("hold out", held_out)
    return Prepared(Sft(), [one.row for one in train], [one.row for one in held_out])


def _of_chats(source: str, field: str, renderer: Renderer, config: SftConfig) -> Samples[Sample]:
    found = Samples[Sample]([])
    for record in read_records(source, field):
        chat = to_chat(record)
        try:
            rows = chat_rows(renderer, chat, config.data.train_on)
        except ValueError as error:
            raise ConfigError(f"{field}: {record.where}: {error}") from error
        if not rows:
            found.left_out[f"chats without an answer that trains ({config.data.train_on})"] += 1
        found.kept += [Sample(row, record.where) for row in rows]
    return found


def _tell(what: str, samples: Sequence[Sample]) -> None:
    total = sum(len(one.row.tokens) for one in samples)
    trained = sum(one.row.trained for one in samples)
    counts = f"{len(samples):,} rows of {len({one.task for one in samples}):,} tasks"
    print_line((f"{what} {counts}: {trained:,} of {total:,} tokens have a weight", "dim"))
