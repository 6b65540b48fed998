"""Choose the examples to train on and those to hold out; say what is left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig, SftConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line, print_sentences
from agentrl.datasets.chats import Chat, to_chat, without_nulls
from agentrl.datasets.files import read_records
from agentrl.datasets.pairs import to_pair, to_scored
from agentrl.datasets.recorded import run_pairs, run_samples, run_scores, served_samples
from agentrl.datasets.rendering import TrainOn, chat_rows
from agentrl.datasets.samples import Example, Samples
from agentrl.runs.excerpts import json_line
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.models.loading import ModelFacts

Reader = Callable[[Renderer, Json, Counter[str]], list[Example]]
"""Makes the examples of a record and counts what it leaves out; ValueError names a wrong field."""


def read_examples(config: OfflineConfig, facts: ModelFacts) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on, and those to hold out; say how many, and what is left out.

    Raises:
        ConfigError: one cannot be read, or none is left.
    """
    data, renderer = config.data, Renderer(facts.tokenizer)
    longest = min(config.learning.max_length or facts.context_length, facts.context_length)
    reader, recorded = _sources(config)
    of_file = partial(file_examples, renderer=renderer, reader=reader)
    found = of_file(data.source, "data.source") if data.source else recorded()
    train, held_out = _fitting(found, longest, "examples"), list[Example]()
    if isinstance(data.held_out, float):
        train, held_out = split(train, data.held_out, config.run.seed)
    elif isinstance(data.held_out, str):
        found = of_file(data.held_out, "data.held_out")
        held_out = _fitting(found, longest, "held-out examples")
    _tell("train on", train)
    if held_out:
        _tell("hold out", held_out)
    return train, held_out


def _sources(config: OfflineConfig) -> tuple[Reader, Callable[[], Samples]]:
    """Return what makes the examples of a record, and those of a run or of served calls."""
    if isinstance(config, SftConfig):
        recorded = run_samples if config.data.from_run is not None else served_samples
        return partial(chat_examples, config.data.train_on), partial(recorded, config)
    if isinstance(config, RewardModelConfig) and config.reward_model.loss == "regression":
        return score_examples, partial(run_scores, config)
    assert isinstance(config, PreferConfig | RewardModelConfig)
    return pair_examples, partial(run_pairs, config)


def _fitting(found: Samples, longest: int, what: str) -> list[Example]:
    """Return the samples that fit into the context, and tell what is left out.

    Raises:
        ConfigError: nothing is left.
    """
    fitting = [one for one in found.kept if one.length <= longest]
    too_long = Counter({f"rows longer than {longest:,} tokens": len(found.kept) - len(fitting)})
    left_out = found.left_out + too_long
    said = "; ".join(f"{count:,} {why}" for why, count in left_out.items())
    if not fitting:
        raise ConfigError(f"data: there are no {what}" + (f": left out are {said}" if said else ""))
    if said:
        print_sentences(f"{what}: left out are {said}", "yellow")
    return fitting


def split(
    samples: Sequence[Example], share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Hold out the samples of a share of the tasks, drawn by the seed.

    Raises:
        ConfigError: one of the two parts would be empty.
    """
    tasks = sorted({one.task for one in samples})
    random.Random(seed).shuffle(tasks)
    held_out = set(tasks[: round(share * len(tasks))])
    train = [one for one in samples if one.task not in held_out]
    rest = [one for one in samples if one.task in held_out]
    if not train or not rest:
        raise ConfigError(
            f"data.held_out: {share:g} of {len(tasks)} tasks leaves one of the parts empty; give "
            "another share, or a file"
        )
    return train, rest


def _tell(what: str, examples: Sequence[Example]) -> None:
    rows = [row for one in examples for row in one.rows]
    tokens, trained = sum(len(row.tokens) for row in rows), sum(row.trained for row in rows)
    counts = f"{len(examples):,} examples of {len({one.task for one in examples}):,} tasks"
    print_line((f"{what} {counts}: {trained:,} of {tokens:,} tokens have a weight", "dim"))


# ---- files


def file_examples(source: str, field: str, renderer: Renderer, reader: Reader) -> Samples:
    """Read the examples of a file or dataset.

    Raises:
        ConfigError: names the file, the line and the field that does not fit.
    """
    found = Samples()
    table = Path(source).suffix == ".parquet" or not Path(source).is_file()
    for where, data in read_records(source, field):
        try:
            read = without_nulls(data) if table else data
            found.kept += reader(renderer, read, found.left_out)
        except ValueError as error:
            raise ConfigError(f"{field}: {where}: {error}") from error
    return found


def chat_examples(
    train_on: TrainOn, renderer: Renderer, data: Json, left_out: Counter[str]
) -> list[Example]:
    chat = to_chat(data)
    rows = chat_rows(renderer, chat, train_on)
    left_out[f"chats without an answer that trains ({train_on})"] += not rows
    asked = takewhile(lambda message: message["role"] != "assistant", chat.messages)
    return [Example((row,), json_line([*asked])) for row in rows]


def pair_examples(renderer: Renderer, data: Json, left_out: Counter[str]) -> list[Example]:
    pair = to_pair(data)
    if isinstance(pair, str):
        left_out[pair] += 1
        return []
    rows = tuple(_last_row(renderer, chat, left_out) for chat in pair)
    prompt = pair[0].messages[: pair[0].weights.index(1.0)]
    return [Example(rows, json_line(prompt))]


def score_examples(renderer: Renderer, data: Json, left_out: Counter[str]) -> list[Example]:
    scored = to_scored(data)
    rows = [_last_row(renderer, chat, left_out) for chat, _ in scored]
    return [
        Example((row,), json_line(chat.messages[:-1]), score)
        for row, (chat, score) in zip(rows, scored, strict=True)
    ]


def _last_row(renderer: Renderer, chat: Chat, left_out: Counter[str]) -> TrainingRow:
    """Return the row of a chat that holds its last answer."""
    rows = chat_rows(renderer, chat, "all")
    separated = "answers that the chat template separates from the last one of their chat"
    left_out[separated] += len(rows) > 1
    return rows[-1]
