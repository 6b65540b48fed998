"""A run whose agent emits no reward: functions give it, also across a crash, and again later."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import agentrl as by_command
from training_run import SUPPORT, Run

import agentrl
from agentrl.cli.runs import rescore_command
from agentrl.config.errors import ConfigError
from agentrl.history.rollout_table import Query, Row, find_rollouts
from agentrl.history.sources import OpenRun, open_run
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Purpose, SkipReason

pytestmark = pytest.mark.timeout(600)
_FILE = SUPPORT / "trace_rewards.py"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; the trainer is killed once the second one's rollouts have been scored."""
    folder = tmp_path_factory.mktemp("scored")
    run = Run(folder, "thankless", rollouts_per_process=8, task_count=8, group_size=2)
    for name in ("size", "even", "rank", "picky"):
        run.arguments += ["--rewards", f"{_FILE}:{name}"]
    run.kill_at("optimizer", 2)
    return run.finish()


def rows(opened: OpenRun, where: str = "") -> list[Row]:
    while opened.fill():
        pass
    return list(find_rollouts(opened.index, Query(where, limit=-1)).rows)


def test_rewards_of_functions_train_and_are_held_out(scored: Run) -> None:
    opened = open_run(scored.folder)
    found = rows(opened, "status == 'completed'")
    opened.close()
    names = Counter(name for row in found for name in row["rewards"])
    assert names["chars"] == names["messages"] == names["rank"] == len(found)
    assert all(row["rewards"]["messages"] == 1.0 for row in found)
    for row in found:
        n = row["task"] if row["purpose"] == "train" else 1000 + row["task"]
        assert ("even" in row["rewards"]) == (n % 2 == 0)
        assert (row["reward"] is None) == (n % 4 == 0)  # the picky function raised
    assert scored.accounting().trained > 0
    skipped = {call.skip_reason for call in scored.calls(purpose=Purpose.TRAIN)}
    assert SkipReason.REFUSED_REWARD in skipped
    assert SkipReason.NO_REWARD not in skipped


def test_a_function_that_raises_is_told_with_a_count(scored: Run) -> None:
    lines = [line for line in scored.output.splitlines() if "picky gave" in line]
    assert lines[0].startswith("note: rewards: picky gave ")
    assert "rollouts no reward: LookupError: no verdict on" in lines[0]
    assert len(lines) <= 2  # the first time, and the sum in the end


def test_no_rollout_is_scored_twice_across_a_resume(scored: Run) -> None:
    written = (scored.folder.root.parent / "scored.txt").read_text().splitlines()
    assert max(Counter(written).values()) == 1
    by_function = Counter(line.split()[0] for line in written)
    with scored.store() as store:
        attempts = [one for one in store.rollouts(scored.run_id) if one.winner]
    assert set(by_function.values()) == {len(attempts)}


def test_an_unknown_function_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "thankless")
    with pytest.raises(ConfigError, match="defines no 'absent'"):
        agentrl.train(*run.arguments[1:], "--rewards", f"{_FILE}:absent")
    assert not run.folder.root.exists()


# ---- again


@pytest.fixture
def copy(scored: Run, tmp_path: Path) -> Path:
    return shutil.copytree(scored.folder.root, tmp_path / "run")


def rescore(copy: Path, reward: str, **options: Any) -> None:
    rescore_command(copy, rewards=[f"{_FILE}:{reward}"], **options)


def test_a_new_reward_counts_beside_the_old_ones_and_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = open_run(RunFolder(copy))
    before = {row["id"]: row["reward"] for row in rows(opened)}
    rescore(copy, "right", where='purpose == "train"')
    after = rows(opened, 'purpose == "train" and status == "completed"')
    said = " ".join(capsys.readouterr().out.split())
    assert f"{len(after)} of 24 rollouts were scored" in said
    paid = sum(row["reward"] is not None for row in after)
    assert re.search(rf"mean total reward \S+ of \d+ → \S+ of {paid} rollouts; what counts", said)
    for row in after:
        old = before[row["id"]]
        assert row["reward"] == (None if old is None else old + row["rewards"]["right"])
    assert rows(opened, "rewards.right >= 0 and purpose == 'eval'") == []
    opened.close()


def test_only_the_new_reward_counts_with_replace(copy: Path) -> None:
    opened = open_run(RunFolder(copy))
    before = {row["id"]: row for row in rows(opened)}
    rescore(copy, "right", replace=True)
    found = rows(opened, "rewards.right >= 0")
    assert {row["status"] for row in found} == {"completed"}
    for row in found:
        assert row["reward"] == row["rewards"]["right"]  # also where a function had failed
        assert row["rewards"]["chars"] == before[row["id"]]["rewards"]["chars"]
    rescore(copy, "right", replace=True)
    assert rows(opened, "rewards.right >= 0") == found
    # The next one without it brings the others back.
    rescore(copy, "rank")
    for row in rows(opened, "reward is not None"):
        assert row["reward"] == pytest.approx(
            sum(x for x in row["rewards"].values() if x is not None)
        )
    opened.close()


@pytest.mark.parametrize(
    ("reward", "where", "said"),
    [
        ("absent", "", "defines no 'absent'"),
        ("right", "nothing > 1", "where: 'nothing' is no column"),
    ],
)
def test_a_wrong_rescore_is_refused(copy: Path, reward: str, where: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rescore(copy, reward, where=where)


# ---- evaluations and checks


def test_eval_and_check_count_what_functions_give(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"n": 1}\n{"n": 2}\n')
    common = ["--runs", tmp_path, "--runners", "1", "--rewards", f"{_FILE}:size,{_FILE}:even"]
    agent = f"{SUPPORT / 'train_agents.py'}:thankless"
    done = by_command("eval", agent, "--tasks", tasks, *common)
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.glob("*/summary.json")
    summary = json.loads(folder.read_text())
    assert summary["successes"] == 2
    assert summary["reward"] > 1.5
