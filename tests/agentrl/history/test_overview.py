from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path

import pytest
from ui_pages import fill_indexes, record_run

from agentrl.config.errors import ConfigError
from agentrl.history.notes import Notes, read_notes, write_notes
from agentrl.history.overview import (
    alerts_of,
    held_out_intervals,
    phase_spans,
    progress_of,
    share_by_phase,
)
from agentrl.history.sources import Sources
from agentrl.runs.circumstances import note_start
from agentrl.runs.folder import RunFolder
from agentrl.runs.statistics import wilson
from agentrl_tracer.store import Store


def test_remaining_time_is_the_median_step_times_the_steps_left(tmp_path: Path) -> None:
    record_run(tmp_path, "one")
    note_start(RunFolder(tmp_path / "one"), steps=10)
    with contextlib.closing(Sources(tmp_path)) as sources:
        run = sources.open("one")
        ends = list(run.store.logged_at(run.id, "seconds/publish", 12).values())
        took = sorted(b - a for a, b in pairwise(ends))
        progress = progress_of(run, "running")
        assert (progress.step, progress.steps, progress.share) == (4, 10, 0.4)
        assert progress.seconds_left == pytest.approx(took[1] * 6)
        assert progress_of(run, "finished").seconds_left is None


def test_intervals_of_evaluations_count_tasks(tmp_path: Path) -> None:
    record_run(tmp_path, "one")
    fill_indexes(tmp_path)
    with contextlib.closing(Sources(tmp_path)) as sources:
        found = held_out_intervals(sources.open("one"), success=1.0)
    assert sorted(found) == [0, 2, 4]
    assert found[0] == pytest.approx(wilson(2 / 6, 6))  # one sample a task


def test_alerts_are_gathered_by_name() -> None:
    rows = {4: {"alert/truncation": 1.0}, 5: {"alert/truncation": 1.0, "a/alert/kl": 1.0, "x": 1.0}}
    assert alerts_of(rows) == {"truncation": [4, 5], "a/kl": [5]}


def test_shares_of_time_add_up_to_one() -> None:
    rows = {1: {"seconds/rollouts": 3.0, "seconds/update": 1.0}, 2: {"seconds/update": 4.0}}
    assert share_by_phase(rows, ["rollouts", "update"]) == {"rollouts": 0.375, "update": 0.625}
    assert share_by_phase({}, ["rollouts"]) == {}


def test_notes_change_only_what_is_given(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_notes(folder) == Notes()
    write_notes(folder, tags=" a,,b , a")
    write_notes(folder, note=" line\r\nother ")
    assert write_notes(folder, archived=True) == Notes(("a", "b"), "line\nother", archived=True)
    assert read_notes(folder) == Notes(("a", "b"), "line\nother", archived=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


def test_damaged_notes_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(ConfigError, match=r"notes\.json is damaged"):
        write_notes(RunFolder(tmp_path), note="new")
    assert (tmp_path / "notes.json").read_text() == "{"


def test_phases_of_the_last_steps_have_their_lengths_in_a_long_run(tmp_path: Path) -> None:
    record_run(tmp_path, "one")
    with contextlib.closing(Store(str(tmp_path / "one" / "store.db"))) as store:
        [run] = store.runs()
        for step in range(5, 501):
            store.log_metrics(run["id"], step, {"seconds/update": 4.0, "seconds/publish": 0.5})
    with contextlib.closing(Sources(tmp_path)) as sources:
        spans = phase_spans(sources.open("one"))
    updates = [(end - start, label) for lane, start, end, label in spans if lane == "update"]
    assert [label for _, label in updates] == [f"step {step}" for step in range(489, 501)]
    assert [seconds for seconds, _ in updates] == pytest.approx([4.0] * 12)
