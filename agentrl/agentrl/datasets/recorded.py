"""Take token rows to imitate from what our own store has recorded, exactly as they were sampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.errors import ConfigError
from agentrl.config.secrets import store_url
from agentrl.config.setting_names import recorded
from agentrl.datasets.samples import Samples
from agentrl.history.evaluations import success_reward
from agentrl.history.export import paths_of, row_records, withholds
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import OpenRun, open_run
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store
from agentrl_trainer.data.training_row import TrainingRow, to_training_row


@dataclass(frozen=True, slots=True)
class Sample:
    """A row to imitate, whose ``advantages`` are the weights of its tokens."""

    row: TrainingRow
    task: str
    """What it answers: samples of one task are never both trained on and held out."""

    @property
    def length(self) -> int:
        return len(self.row.tokens)


def run_samples(
    path: Path, model: str, where: str | None, best_of: int | None, last: bool
) -> Samples[Sample]:
    """Return the rows of a run's rollouts.

    Args:
        model: the base model, of whose tokens the rows must be.
        where: which rollouts; by default the successful ones, with ``best_of`` those with a reward.
        best_of: of each task only so many rollouts, those with the highest rewards; the earliest
            of equal ones, and of equal tokens only one.
        last: whether only the last answer of each row trains.

    Raises:
        ConfigError: the run has another base model, or ``where`` is wrong.
    """
    with run_of_model(path, model) as run:
        where = where or ("reward is not None" if best_of else f"reward >= {success_reward(run)}")
        return _of_rollouts(run, where, best_of, last)


@contextmanager
def run_of_model(path: Path, model: str) -> Iterator[OpenRun]:
    """Open a run with its index complete.

    Raises:
        ConfigError: it is no run, or one of another base model, whose tokens are others.
    """
    with closing(open_run(RunFolder.existing(path, "data.from_run"))) as run:
        known = recorded(run.row["config"], "model.name")
        if known is not None and known != model:
            raise ConfigError(
                f"data.from_run: {path} has the tokens of {known}, not of {model}: give --model "
                f"{known}, or write its chats with `agentrl runs export {path} --format sft "
                "--output chats.jsonl` and give them to --data"
            )
        while run.fill():
            pass
        yield run


def _of_rollouts(run: OpenRun, where: str, best_of: int | None, last: bool) -> Samples[Sample]:
    found = Samples[Sample]([])
    by_rollout: dict[str, list[Json]] = defaultdict(list)
    for record in row_records(run, where, imitated=True):
        by_rollout[record["rollout"]].append(record)
    held_out = _count(run, f"({where}) and purpose == 'eval'") if withholds(run, where) else 0
    found.left_out["rollouts of held-out tasks (name purpose in --where to take them)"] += held_out
    without = _count(run, where) - held_out - len(by_rollout)
    found.left_out["rollouts without an answer of a model that is sampled here"] += without
    taken, seen = Counter[str](), set[tuple[int, ...]]()
    rollouts: Iterable[list[Json]] = by_rollout.values()
    if best_of:
        rollouts = sorted(rollouts, key=lambda records: -(records[0]["reward"] or 0.0))
    for records in rollouts:
        task = records[0]["task"]
        new = [one for one in records if tuple(one["tokens"]) not in seen]
        if not new:
            found.left_out["rollouts with the same tokens as another"] += 1
        elif best_of and taken[task] >= best_of:
            found.left_out[f"rollouts beside the best {best_of} of their task"] += 1
        else:
            taken[task] += 1
            seen.update(tuple(one["tokens"]) for one in new)
            found.kept += [Sample(_row(one["tokens"], one["mask"], last), task) for one in new]
    return found


def _count(run: OpenRun, where: str) -> int:
    return find_rollouts(run.index, Query(where, limit=1)).total


def served_samples(url: str, last: bool) -> Samples[Sample]:
    """Return a row for each call that `agentrl serve` answered with a model of its own.

    Raises:
        ConfigError: there is no such store.
    """
    if "://" not in url and not Path(url).is_file():  # else it would be made
        raise ConfigError(f"data.from_served: {url} is not there; `agentrl serve` makes it")
    found, seen = Samples[Sample]([]), set[tuple[int, ...]]()
    with closing(Store(store_url(url), read_only=True)) as store:
        calls = store.newest_calls(None, None)
    for call in reversed(calls):
        paths = paths_of([call], imitated=True)
        if not paths:
            found.left_out["calls that failed, or were answered by another server's model"] += 1
            continue
        row = to_training_row(paths[0], {call.id: 1.0})
        if tuple(row.tokens) in seen:
            found.left_out["calls with the same tokens as another"] += 1
            continue
        seen.add(tuple(row.tokens))
        found.kept.append(Sample(_row(row.tokens, row.mask, last), call.id))
    return found


def _row(tokens: list[int], mask: Sequence[bool], last: bool) -> TrainingRow:
    """Return a row all of whose sampled tokens train, or only those of the last answer."""
    own = list(mask)
    if last:
        end = max(at for at, on in enumerate(own) if on) + 1
        start = next((at for at in range(end, 0, -1) if not own[at - 1]), 0)
        own[:start] = [False] * start
    return TrainingRow(tokens, own, [0.0] * len(own), [float(on) for on in own])
