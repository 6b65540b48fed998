"""``agentrl runs``: each command on recorded runs, at 80 columns and piped."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_records import call_of, claimed, start_run
from ui_pages import Recorded

from agentrl.cli.main import main
from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.console.output import console
from agentrl.history.sources import OpenRun
from agentrl.runs.circumstances import note_failure
from agentrl.runs.folder import RunFolder
from agentrl.training.session import RunError
from agentrl_tracer.store import Store

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Run ``agentrl runs`` and return what it printed; ``code`` is the exit code to expect."""

    def run(*arguments: object, code: int = 0, width: int = 100_000) -> str:
        monkeypatch.setattr(sys, "argv", ["agentrl", "runs", *map(str, arguments)])
        monkeypatch.setattr(console, "_width", width)
        ended: Any = 0
        try:
            main()
        except SystemExit as exit:
            ended = exit.code or 0
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.err if code else printed.out

    return run


def rows(printed: str) -> list[Any]:
    return [json.loads(line) for line in printed.splitlines()]


def test_a_list_has_each_name_whole_at_80_columns_and_as_json(
    recorded: Recorded, said: Said, tmp_path: Path
) -> None:
    long = "gsm8k-rank32-lr2e-5-seed-1-again"
    for name in ("short", long):
        shutil.copytree(recorded.root / "other", tmp_path / name)
    for width, curve in ((80, 0), (120, 4)):
        lines = said("list", tmp_path, width=width).splitlines()
        assert [line.split()[0] for line in lines] == ["name", long, "short"]
        assert max(map(len, lines)) <= width
        assert all(sum(one in "▁▂▃▄▅▆▇█" for one in line) == curve for line in lines[1:])
    [first, second] = rows(said("list", tmp_path, "--json"))
    assert (first["name"], second["name"]) == (long, "short")
    assert (first["progress"]["step"], first["progress"]["steps"]) == (4, 4)
    assert (first["kind"], first["state"], first["model"]) == ("train", "finished", "agentrl-tiny")
    assert first["folder"] == str(tmp_path / long)
    assert first["created_at"] < first["ended_at"]
    assert first["held_out"][-1] == pytest.approx(3 / 6)


def test_show_has_the_books_evaluations_by_field_and_what_flipped(
    recorded: Recorded, said: Said
) -> None:
    shown = said("show", recorded.root / "known")
    assert "recorded = " in shown
    assert "adds up" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["step", "4", "6", "1", "66.7%", "(30.0%", "to", "90.3%)"] in lines
    assert ["cores", "busy", "start", "50%,", "rollouts", "90%"] in lines
    assert "level = easy" in shown
    assert "step 0 to 4: +33.3 points on 6 tasks, 3 gained, 1 lost; p = 0.62" in shown


def test_show_says_why_a_run_failed(recorded: Recorded, said: Said, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(recorded.root / "other", tmp_path / "one")))
    assert "failed:" not in said("show", folder.root)
    note_failure(folder, RunError("the gateway does not start"))
    assert "failed: RunError: the gateway does not start\n" in said("show", folder.root)


def test_rollouts_are_filtered_sorted_and_searched(recorded: Recorded, said: Said) -> None:
    run = recorded.root / "known"
    chosen = ("--where", "reward<0 and step>3", "--limit", 2)
    lines = said("rollouts", run, *chosen, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("2 of ")
    assert len(lines[1].split()[0]) == 24  # ids are whole
    found = rows(said("rollouts", run, "--sort", "-reward", "--limit", 3, "--json"))
    assert [row["reward"] for row in found] == [1.0, 1.0, 1.0]
    assert found[0]["rewards"] == {"correct": 1.0, "clarity": 0.0}
    assert len(rows(said("rollouts", run, "--limit", 0, "--json"))) == 32 + 18
    assert "0 of 0 rollouts" in said("rollouts", run, "--search", "nowhere")
    assert "'rewrd' is no column" in said("rollouts", run, "--where", "rewrd > 0", code=2)
    assert "\x1b" not in said("rollouts", run, "--where", "status == 'failed'")


def test_a_rollout_is_found_in_whichever_run_has_it(recorded: Recorded, said: Said) -> None:
    shown = said("rollout", recorded.ids["first"], "--runs", recorded.root)
    assert shown.startswith(f"rollout {recorded.ids['first']}  completed")
    assert "execute_tool look_up" in shown
    hostile = said("rollout", recorded.ids["failed"], "--runs", recorded.root)
    assert "no tool of this name" in hostile
    assert not {"\x1b", "\u202e"} & {*hostile}
    assert "is no rollout of a run in" in said("rollout", "x", "--runs", recorded.root, code=2)


def test_compare_names_differences_curves_and_the_paired_test(
    recorded: Recorded, said: Said
) -> None:
    shown = said("compare", recorded.root / "known", recorded.root / "other", width=80)
    *tables, tested = shown.splitlines()
    assert max(map(len, tables)) <= 80
    assert ["learning.learning_rate", "–", "0.02"] in [line.split() for line in tables]
    assert "reward/mean" in shown
    assert tested == (
        "known to other: -16.7 points on 6 tasks, 0 gained, 1 lost; p = 1 (paired exact "
        "sign-flip test)"
    )
    assert "at least two" in said("compare", recorded.root / "known", code=2)


def test_calls_of_a_run_and_those_that_were_served(
    recorded: Recorded, said: Said, tmp_path: Path
) -> None:
    assert "execute" not in said("calls", recorded.root / "other", "--limit", 3)
    newest = rows(said("calls", recorded.root / "other", "--limit", 2, "--json"))
    assert [call["seq"] for call in newest] == [2, 1]
    there = tmp_path / "serve.db"
    with contextlib.closing(Store(str(there))) as store:
        start_run(store, 1)
        claim = claimed(store)
        served = call_of(claim, "chatcmpl-served", run_id=None, rollout_id=None, attempt_id=None)
        store.write_calls("boot", [], [served, call_of(claim, "chatcmpl-of-a-run")], 2)
    shown = said("calls", "--served", "--store", there)
    assert "chatcmpl-served" in shown
    assert "of-a-run" not in shown
    assert said("feedback", "--served", "--store", there) == ""
    assert "is not there" in said("calls", "--served", "--store", tmp_path / "no.db", code=2)
    assert "--served" in said("calls", code=2)


def test_export_writes_every_format(
    recorded: Recorded, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = recorded.root / "other", tmp_path / "out"
    assert len(rows(said("export", run, "--where", "step == 1"))) == 8
    assert rows(said("export", run, "--format", "sft"))[0]["messages"]
    said("export", run, "--format", "pairs", "--output", file)
    assert rows(file.read_text())[0]["chosen"]
    as_table = ("export", run, "--format", "parquet", "--output", file)
    parquet = pytest.importorskip("pyarrow.parquet")
    said(*as_table)
    table = parquet.read_table(file)
    assert table.num_rows == 32 + 18
    assert json.loads(table["calls"][0].as_py())[0]["response_ids"]
    monkeypatch.setattr(OpenRun, "fill", lambda _: pytest.fail("takes minutes"))
    assert "needs a file" in said("export", run, "--format", "parquet", code=2)
    nowhere = tmp_path / "nowhere" / "out"
    assert "there is no folder" in said("export", run, "--output", nowhere, code=2)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install pyarrow" in said(*as_table, code=2)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "sft", "pairs"])
def test_a_wrong_condition_is_said_before_the_index_is_filled_or_a_file_changed(
    recorded: Recorded, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    file = tmp_path / "out"
    file.write_text("precious")
    export = ("export", recorded.root / "other", "--format", format, "--output", file, "--where")
    assert "is not understood" in said(*export, "reward > 0 #", code=2)
    monkeypatch.setattr(OpenRun, "fill", lambda _: pytest.fail("takes minutes"))
    assert "'rewrd' is no column" in said(*export, "rewrd > 0", code=2)
    assert file.read_text() == "precious"


def test_prune_says_what_may_go_asks_and_keeps_what_is_needed(
    recorded: Recorded, said: Said, tmp_path: Path
) -> None:
    run = tmp_path / "other"
    shutil.copytree(recorded.root / "other", run)
    versions = [run / "adapters" / "policy" / f"v{n:06d}" for n in range(4)]
    for folder in (*versions, run / "checkpoints" / "step-000004", run / "adapter-best"):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(1_000_000))
    (versions[1] / "keep").touch()
    own = versions[0].with_name("v000003-good")
    own.mkdir()
    assert "say --yes" in said("prune", tmp_path, code=2)
    assert all(folder.exists() for folder in versions)
    lines = [line.split() for line in said("prune", tmp_path, "--yes").splitlines()]
    assert ["other", "adapters", "2", "2.0"] in lines
    assert ["other", "checkpoints", "1", "1.0"] in lines
    assert [folder.exists() for folder in (*versions, own)] == [False, True, False, True, True]
    assert not list((run / "checkpoints").iterdir())
    assert not list((run / "logs").iterdir())
    assert (run / "adapter-best" / "weights").exists()
    assert "adds up" in said("show", run)
    assert "nothing to prune" in said("prune", tmp_path)
    with contextlib.closing(Store(str(run / "store.db"))) as store:
        store.end_run(store.runs()[0]["id"], "interrupted")
    (run / "checkpoints" / "step-000004").mkdir()
    assert "checkpoints" not in said("prune", tmp_path)  # it may be resumed


def test_trajectories_are_imported_as_a_run(recorded: Recorded, said: Said, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    said("export", recorded.root / "other", "--format", "atif", "--output", file)
    count = len(file.read_text().splitlines())
    told = said("import", file, "--runs", tmp_path / "runs", "--name", "back")
    assert told.split()[:3] == [str(count), "rollouts", "in"]
    assert f"{count} completed" in said("show", tmp_path / "runs/back")
    assert "exists already" in said(
        "import", file, "--runs", tmp_path / "runs", "--name", "back", code=2
    )
    assert "give at least one file" in said("import", code=2)
    with pytest.raises(ConfigError, match="holds imported trajectories"):
        load(TrainConfig, ["--resume", str(tmp_path / "runs/back")], {})
