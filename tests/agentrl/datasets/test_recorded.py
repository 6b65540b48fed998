"""Rows to imitate are the recorded tokens: of the good rollouts, the best of a task, each once."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_records import make
from ui_pages import Recorded, record_served

from agentrl.config.commands import SftConfig
from agentrl.config.errors import ConfigError
from agentrl.datasets.recorded import run_samples, served_samples
from agentrl.datasets.samples import Samples
from agentrl.history.export import rollout_records
from agentrl.history.sources import OpenRun, open_run
from agentrl.runs.folder import RunFolder
from agentrl_proxy.requests.recording import BASE_MODEL
from agentrl_tracer.schemas import CallState, SkipReason
from agentrl_tracer.store import Store


@pytest.fixture(scope="module")
def path(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose index is not up to date."""
    copied = tmp_path_factory.mktemp("copied") / "run"
    shutil.copytree(recorded.root / recorded.other, copied)
    for file in copied.glob("view.db*"):
        file.unlink()
    return copied


@pytest.fixture
def run(path: Path) -> Iterator[OpenRun]:
    with closing(open_run(RunFolder(path))) as opened:
        while opened.fill():
            pass
        yield opened


def config(data: dict[str, Any], model: str = "agentrl-tiny") -> SftConfig:
    return SftConfig.model_validate({"data": data, "model": {"name": model}})


def samples(
    path: Path, where: str | None = None, best_of: int | None = None, *, last: bool = False
) -> Samples:
    data = {"from_run": path, "where": where, "best_of": best_of}
    return run_samples(config(data | ({"train_on": "last"} if last else {})))


def test_the_successful_rollouts_give_their_recorded_tokens(path: Path, run: OpenRun) -> None:
    found = samples(path)
    good = list(rollout_records(run, "purpose == 'train' and reward >= 1"))
    calls = [call for one in good for call in one["calls"] if call["agent"] == "solver"]
    whole = {tuple(call["prompt_ids"] + call["response_ids"]) for call in calls}
    rows = {tuple(one.rows[0].tokens): one.rows[0] for one in found.kept}
    assert len(rows) == len(found.kept) > 0
    assert rows.keys() < whole  # each second call, which holds the first
    for call in calls:
        if (row := rows.get(tuple(call["prompt_ids"] + call["response_ids"]))) is not None:
            start = len(call["prompt_ids"])
            assert row.mask[start:] == [True] * len(call["response_ids"])
            assert row.advantages == [float(on) for on in row.mask]
            assert not all(row.mask)
    counted = len(good) - found.left_out["rollouts with the same tokens as another"]
    assert counted == len(found.kept)
    assert found.left_out["rollouts of held-out tasks (name purpose in --where to take them)"]
    assert any(one.task.startswith("eval-") for one in samples(path, "purpose == 'eval'").kept)


def test_the_best_of_a_task_are_those_with_the_highest_rewards(path: Path, run: OpenRun) -> None:
    every, best = samples(path, best_of=100), samples(path, best_of=1)
    assert Counter(one.task for one in best.kept) == dict.fromkeys({s.task for s in every.kept}, 1)
    rewards: dict[str, float] = {}
    for one in rollout_records(run, "purpose == 'train' and reward is not None"):
        task = f"train-{one['task']}"
        rewards[task] = max(rewards.get(task, -9.0), one["reward"])
    solved = {task for task, reward in rewards.items() if reward >= 1}
    assert solved == {one.task for one in samples(path).kept}
    good = {tuple(one.rows[0].tokens) for one in samples(path).kept}
    assert all((tuple(one.rows[0].tokens) in good) == (one.task in solved) for one in best.kept)
    assert best.left_out["rollouts beside the best 1 of their task"] > 0
    counted = [len(found.kept) + sum(found.left_out.values()) for found in (best, every)]
    assert counted[0] == counted[1]


def test_only_the_last_answer_trains_if_told_so(path: Path) -> None:
    for whole, last in zip(samples(path).kept, samples(path, last=True).kept, strict=True):
        assert whole.rows[0].tokens == last.rows[0].tokens
        assert 0 < last.rows[0].trained < whole.rows[0].trained
        assert last.rows[0].mask[-last.rows[0].trained :] == [True] * last.rows[0].trained


def test_another_model_and_a_wrong_condition_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.from_run: .* tokens of agentrl-tiny, not of m: "):
        run_samples(config({"from_run": path}, "m"))
    with pytest.raises(ConfigError, match="'rewrd' is no column"):
        samples(path, "rewrd > 1")
    with pytest.raises(ConfigError, match=r"data.from_run: .* is no run folder"):
        samples(path.parent / "none")


def test_served_calls_are_rows(tmp_path: Path) -> None:
    url = tmp_path / "serve.db"
    record_served(url, 1)  # [1] and then [2]
    outside = {"run_id": None, "rollout_id": None, "attempt_id": None}
    calls = [
        make("again", [1], [2], **outside),
        make("base", [1, 2], [3, 4], adapter=None, skip_reason=SkipReason.NO_ROLLOUT, **outside),
        make("provider", [], [], adapter=None, **outside),
        replace(make("failed", [1], [5], **outside), state=CallState.ERROR),
        replace(make("other tokens", [1], [6], **outside), params={BASE_MODEL: "another"}),
    ]
    with closing(Store(str(url))) as store:
        store.write_calls("boot", [], calls, 5)
    found = served_samples(config({"from_served": str(url)}))
    rows = sorted((one.rows[0].tokens, one.rows[0].mask) for one in found.kept)
    assert rows == [([1, 2], [False, True]), ([1, 2, 3, 4], [False, False, True, True])]
    assert sorted(found.left_out.values()) == [1, 1, 2]
    assert found.left_out["calls that another answered: train it with --model another"] == 1
    other = make("another answer", [1, 2], [5], adapter=None, **outside)
    with closing(Store(str(url))) as store:
        store.write_calls("boot", [], [other], 6)
    tasks = Counter(one.task for one in served_samples(config({"from_served": str(url)})).kept)
    assert sorted(tasks.values()) == [1, 2]  # both answers to a prompt are held out, or none
    with pytest.raises(ConfigError, match=r"data.from_served: .* is not there"):
        served_samples(config({"from_served": str(tmp_path / "none.db")}))
