"""Choose the examples to train on and those to hold out; say what is left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.config.commands import PreferConfig, RewardModelConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import print_line, print_sentences
from agentrl.datasets.preferences import JudgedBy
from agentrl.datasets.samples import S, Samples
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.models.loading import ModelFacts


def read_judged(
    config: PreferConfig | RewardModelConfig,
    facts: ModelFacts,
    of_run: Callable[[Path, str, str | None, JudgedBy], Samples[S]],
    of_file: Callable[[str, str, Renderer], Samples[S]],
    what: str,
) -> tuple[list[S], list[S]]:
    """Return the pairs or scored rows to train on, and those to hold out; say how many.

    Args:
        of_run, of_file: read them from a run folder, or from a file or dataset.
        what: their name, in the plural.

    Raises:
        ConfigError: one cannot be read, or none is left.
    """
    data, renderer = config.data, Renderer(facts.tokenizer)
    longest = min(config.learning.max_length or facts.context_length, facts.context_length)
    if data.from_run is not None:
        found = of_run(data.from_run, config.model.name, data.where, data.by)
    else:
        found = of_file(data.source or "", "data.source", renderer)
    train, held_out = train_and_held_out(
        found, data.held_out, longest, config.run.seed,
        lambda source: of_file(source, "data.held_out", renderer),
    )  # fmt: skip
    tasks = len({one.task for one in train})
    print_line((f"train on {len(train):,} {what} of {tasks:,} prompts or tasks", "dim"))
    if held_out:
        print_line((f"hold out {len(held_out):,} {what}", "dim"))
    return train, held_out


def train_and_held_out(
    given: Samples[S],
    held_out: str | None,
    longest: int,
    seed: int,
    read: Callable[[str], Samples[S]],
) -> tuple[list[S], list[S]]:
    """Return the examples to train on, and those to hold out: a share of the given ones, or those
    that ``read`` returns of another source.

    Raises:
        ConfigError: there are none, or ``held_out`` cannot be read.
    """
    train, share = _fitting(given, longest, "examples"), _share(held_out)
    if share is not None:
        return split(train, share, seed)
    if held_out is None:
        return train, []
    return train, _fitting(read(held_out), longest, "held-out examples")


def _fitting(found: Samples[S], longest: int, what: str) -> list[S]:
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


def _share(held_out: str | None) -> float | None:
    """Read a share of the examples, such as 0.1; None for a file or nothing.

    Raises:
        ConfigError: it is not between 0 and 1.
    """
    try:
        share = float(held_out or "")
    except ValueError:
        return None
    if not 0 < share < 1:
        raise ConfigError(f"data.held_out: {held_out}: give a share between 0 and 1, or a file")
    return share


def split(samples: Sequence[S], share: float, seed: int) -> tuple[list[S], list[S]]:
    """Hold out the samples of a share of the tasks, drawn by the seed.

    Raises:
        ConfigError: one of the two parts would be empty.
    """
    tasks = sorted({one.task for one in samples})
    random.Random(seed).shuffle(tasks)
    held_out = set(tasks[: round(share * len(tasks))])
    parts = (
        [one for one in samples if one.task not in held_out],
        [one for one in samples if one.task in held_out],
    )
    if not all(parts):
        raise ConfigError(
            f"data.held_out: {share:g} of {len(tasks)} tasks leaves one of the parts empty; give "
            "another share, or a file"
        )
    return parts
