"""Take token rows from what our own store has recorded, exactly as they were sampled."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from agentrl.config.commands import OfflineConfig, PreferConfig, RewardModelConfig, SftConfig
from agentrl.config.errors import ConfigError
from agentrl.config.secrets import store_url
from agentrl.config.setting_names import recorded
from agentrl.datasets.samples import Example, Samples, weighted_row
from agentrl.history.evaluations import success_reward
from agentrl.history.export import paths_of, row_records, training_only
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder
from agentrl_proxy.requests.recording import BASE_MODEL
from agentrl_tracer.schemas import Json
from agentrl_tracer.store import Store
from agentrl_trainer.data.training_row import TrainingRow, to_training_row

Rollout = list[Json]
"""The rows of a rollout, as ``row_records`` gives them."""
Judged = tuple[Rollout, float]


def _rollouts(config: OfflineConfig, left_out: Counter[str]) -> list[Rollout]:
    """Return the rollouts of ``data.from_run`` that match and have rows; count the others.

    Raises:
        ConfigError: it is no run, or one of another base model, whose tokens are others; or no
            rollout matches, or ``where`` is wrong.
    """
    path, model = config.data.from_run or Path(), config.model.name
    with closing(open_run(RunFolder.existing(path, "data.from_run"))) as run:
        if (known := recorded(run.row["config"], "model.name", model)) != model:
            raise ConfigError(
                f"data.from_run: {path} has the tokens of {known}, not of {model}: give --model "
                f"{known}, or write its chats with `agentrl runs export {path} --format sft "
                "--output chats.jsonl` and give them to --data"
            )
        while run.fill():
            pass

        def count(where: str) -> int:
            return find_rollouts(run.index, Query(where, limit=1)).total

        where = config.data.where or "id is not None"
        if isinstance(config, SftConfig) and not config.data.where:
            best_of = config.data.best_of
            where = "reward is not None" if best_of else f"reward >= {success_reward(run)}"
        if not (matching := count(where)):
            raise ConfigError(
                f"data.where: the run has no rollout with {where}; give another --where"
            )
        records = row_records(run, where, imitated=True)
        found = [list(rows) for _, rows in groupby(records, key=itemgetter("rollout"))]
        held_out = count(f"({where}) and purpose == 'eval'") if training_only(run, where) else 0
    left_out["rollouts of held-out tasks (name purpose in --where to take them)"] += held_out
    without = matching - held_out - len(found)
    left_out["rollouts without an answer of a model that is sampled here"] += without
    return found


# ---- to imitate


def run_samples(config: SftConfig) -> Samples:
    """Return the rows of the rollouts of ``data.from_run``; of equal tokens only one.

    With ``best_of`` the earliest of equal rewards.

    Raises:
        ConfigError: as ``_rollouts``.
    """
    found = Samples()
    rollouts = _rollouts(config, found.left_out)
    if config.data.best_of:
        rated = [records for records in rollouts if records[0]["reward"] is not None]
        found.left_out["rollouts without a reward"] += len(rollouts) - len(rated)
        rollouts = sorted(rated, key=lambda records: -records[0]["reward"])
    if config.data.train_on == "last":  # ids of calls are in the order of time
        found.left_out["rows before the last answer of their rollout"] += sum(
            len(records) - 1 for records in rollouts
        )
        rollouts = [[max(records, key=lambda one: max(one["calls"]))] for records in rollouts]
    return _without_copies(rollouts, config, "rollouts", found)


def served_samples(config: SftConfig) -> Samples:
    """Return a row for each call that `agentrl serve` answered with a model over this base.

    Raises:
        ConfigError: there is no such store.
    """
    url, found = config.data.from_served or "", Samples()
    if "://" not in url and not Path(url).is_file():  # else it would be made
        raise ConfigError(f"data.from_served: {url} is not there; `agentrl serve` makes it")
    with closing(Store(store_url(url), read_only=True)) as store:
        calls = store.newest_calls(None, None)
    made: list[Rollout] = []
    for call in reversed(calls):
        base = call.params.get(BASE_MODEL, config.model.name)
        if base != config.model.name:
            found.left_out[f"calls that {base} answered: train it with --model {base}"] += 1
        elif paths := paths_of([call], imitated=True):
            row = to_training_row(paths[0], {call.id: 1.0})
            asked = json.dumps(call.prompt_ids)
            made.append([{"task": asked, "tokens": row.tokens, "mask": row.mask}])
        else:
            found.left_out["calls that failed, or were answered by another server's model"] += 1
    return _without_copies(made, config, "calls", found)


def _without_copies(
    rollouts: Sequence[Rollout], config: SftConfig, what: str, found: Samples
) -> Samples:
    """Add the rows of those that say something new, of each task the first ``best_of``."""
    taken, seen, best_of = Counter[str](), set[tuple[int, ...]](), config.data.best_of
    for records in rollouts:
        task = records[0]["task"]
        new = [one for one in records if tuple(one["tokens"]) not in seen]
        if not new:
            found.left_out[f"{what} with the same tokens as another"] += 1
        elif best_of and taken[task] >= best_of:
            found.left_out[f"{what} beside the best {best_of} of their task"] += 1
        else:
            taken[task] += 1
            seen.update(tuple(one["tokens"]) for one in new)
            rows = (_row(one["tokens"], one["mask"], config) for one in new)
            found.kept += [Example((row,), task) for row in rows]
    return found


def _row(tokens: list[int], mask: Sequence[bool], config: SftConfig) -> TrainingRow:
    """Return a row all of whose sampled tokens train, or only those of the last answer."""
    start = 0
    if config.data.train_on == "last":
        end = max(at for at, on in enumerate(mask) if on)
        start = next((at + 1 for at in range(end, -1, -1) if not mask[at]), 0)
    return weighted_row(tokens, [float(on and at >= start) for at, on in enumerate(mask)])


# ---- to prefer and to score


def run_pairs(config: PreferConfig | RewardModelConfig) -> Samples:
    """Pair the best rollout of each group of ``data.from_run`` with its worst.

    Their rows are the longest that answer the same prompt.

    Raises:
        ConfigError: as for ``run_scores``.
    """
    found, by, groups = Samples(), config.data.by, defaultdict[str, list[Judged]](list)
    for records, value in _judged(config, found.left_out):
        groups[records[0]["group"]].append((records, value))
    for members in groups.values():
        (best, most), (worst, least) = (choose(members, key=itemgetter(1)) for choose in (max, min))
        both = [one for one in product(best, worst) if _asked(one[0]) == _asked(one[1])]
        if len(members) < 2:
            found.left_out[f"groups with a single rollout that has a {by}"] += 1
        elif most == least:
            found.left_out[f"groups without a difference in {by}"] += 1
        elif not both:
            found.left_out["groups whose best and worst rollouts answer no prompt in common"] += 1
        else:
            chosen, rejected = max(both, key=lambda two: sum(len(one["tokens"]) for one in two))
            rows = len(best) + len(worst) - 2
            found.left_out["rows beside the longest that answer the same prompt"] += rows
            if chosen["tokens"] == rejected["tokens"]:
                found.left_out["groups whose best and worst rollouts have the same tokens"] += 1
            else:
                found.kept.append(Example((_whole(chosen), _whole(rejected)), chosen["task"]))
    return found


def run_scores(config: PreferConfig | RewardModelConfig) -> Samples:
    """Return the longest row of each rollout of ``data.from_run`` that has a reward or feedback.

    Raises:
        ConfigError: as ``_rollouts``; or there is no feedback.
    """
    found = Samples()
    for records, value in _judged(config, found.left_out):
        found.left_out["rows beside the longest of their rollout"] += len(records) - 1
        longest = max(records, key=lambda one: len(one["tokens"]))
        found.kept.append(Example((_whole(longest),), longest["task"], value, longest["group"]))
    return found


def _judged(config: PreferConfig | RewardModelConfig, left_out: Counter[str]) -> list[Judged]:
    """Return the rollouts of ``data.from_run`` that have a reward or feedback, with it.

    Raises:
        ConfigError: as for ``run_scores``.
    """
    data, rollouts, found = config.data, _rollouts(config, left_out), list[Judged]()
    for records in rollouts:
        value = _of_people(records[0]) if data.by == "feedback" else records[0]["reward"]
        if value is None:
            left_out[f"rollouts without a {data.by}"] += 1
        else:
            found.append((records, value))
    if not found and data.by == "feedback":
        raise ConfigError(
            f"data.by: none of the {len(rollouts)} rollouts of {data.from_run} has feedback. "
            "Give thumbs or scores in `agentrl ui`, for a pair to two of a group, or leave --by out"
        )
    return found


def _asked(record: Json) -> tuple[str, list[int]]:
    """Whom a row asked what: its adapter, and the tokens before its first answer."""
    return record["adapter"], record["tokens"][: record["mask"].index(True)]


def _whole(record: Json) -> TrainingRow:
    return weighted_row(record["tokens"], [float(on) for on in record["mask"]])


def _of_people(row: Json) -> float | None:
    """Return the mean of what people judged a rollout by, such as ``human:helpful``."""
    rewards: Json = row["rewards"] or {}
    values = [value for name, value in rewards.items() if name.startswith("human:")]
    return fmean(values) if values else None
