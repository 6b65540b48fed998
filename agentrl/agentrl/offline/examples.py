"""Choose the examples to train on and those to hold out; say what is left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from agentrl.config.errors import ConfigError
from agentrl.console.output import print_sentences
from agentrl.datasets.samples import S, Samples


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
