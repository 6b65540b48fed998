from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from ui_pages import Recorded

from agentrl.config.errors import ConfigError
from agentrl.history.notes import Notes, read_notes, write_notes
from agentrl.history.overview import alerts_of, phase_spans, progress_of
from agentrl.history.sources import OpenRun, Sources
from agentrl.runs.circumstances import note_start
from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store


@pytest.fixture(scope="module")
def run(recorded: Recorded) -> Iterator[OpenRun]:
    with contextlib.closing(Sources(recorded.root)) as sources:
        yield sources.open(recorded.other)


def test_remaining_time_is_the_median_step_times_the_steps_left(
    run: OpenRun, tmp_path: Path
) -> None:
    note_start(folder := RunFolder(tmp_path), steps=10)
    planned = OpenRun(folder, run.store, run.row, run.index)
    ends = list(run.store.logged_at(run.id, "seconds/publish", 12).values())
    took = sorted(b - a for a, b in pairwise(ends))
    progress = progress_of(planned, "running")
    assert (progress.step, progress.steps, progress.share) == (4, 10, 0.4)
    assert progress.seconds_left == pytest.approx(took[1] * 6)
    assert progress_of(planned, "finished").seconds_left is None


def test_alerts_are_gathered() -> None:
    rows = {4: {"alert/truncation": 1.0}, 5: {"alert/truncation": 1.0, "a/alert/kl": 1.0, "x": 1.0}}
    assert alerts_of(rows) == {"truncation": [4, 5], "a/kl": [5]}


def test_notes_change_only_what_is_given_and_damage_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_notes(folder) == Notes()
    write_notes(folder, tags=" a,,b , a")
    write_notes(folder, note=" line\nother ", archived=None)
    expected = Notes(tags=("a", "b"), note="line\nother", archived=True)
    assert write_notes(folder, archived=True) == read_notes(folder) == expected
    with pytest.raises(ConfigError, match="tags: String should have at most 40 characters"):
        write_notes(folder, tags="x" * 41)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(ConfigError, match=r"notes\.json is damaged"):
        write_notes(folder, note="new")
    assert (tmp_path / "notes.json").read_text() == "{"


def test_phases_of_the_last_steps_have_their_lengths_in_a_long_run(
    run: OpenRun, tmp_path: Path
) -> None:
    with contextlib.closing(Store(str(tmp_path / "store.db"))) as store:
        run_id = store.create_run("long", "train", {})
        for step in range(1, 501):
            store.log_metrics(run_id, step, {"seconds/update": 4.0, "seconds/publish": 0.5})
        spans = phase_spans(OpenRun(run.folder, store, {"id": run_id}, run.index))
    updates = [(end - start, label) for lane, start, end, label in spans if lane == "update"]
    assert [label for _, label in updates] == [f"step {step}" for step in range(489, 501)]
    assert [seconds for seconds, _ in updates] == pytest.approx([4.0] * 12)
