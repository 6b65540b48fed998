"""A resumed run has each row of metrics once, in the file and in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.runs.folder import RunFolder
from agentrl.training.metrics_log import MetricsLog
from agentrl_tracer.store import Store

ROW: dict[str, Any] = {"step": 2, "reward/mean": None, "loss": 0.5}


@pytest.mark.parametrize("logged", [True, False])
def test_the_checkpoints_row_stands_in_where_none_was_logged(
    tmp_path: Path, store: Store, logged: bool
) -> None:
    """A row without a mean reward counts, too."""
    folder = RunFolder.create(tmp_path, "run", "train")
    run_id = store.create_run("run", "train", {})
    log = MetricsLog(
        TrainConfig(**nested(agent="x:y", tasks=tmp_path)), folder, store, run_id, print
    )
    earlier, evaluated = {"step": 1, "reward/mean": 0.5}, {"step": 2, "eval/accuracy": 1.0}
    rows = [earlier, *([ROW | {"seconds/publish": 1.0}] if logged else []), evaluated]
    for row in [*rows, {"step": 3, "reward/mean": 0.0}]:
        folder.append_metrics(row)  # the process died before the store had them
    log.go_back(2, ROW)
    assert log.rows() == [*rows, *([] if logged else [ROW])]
    assert log.held_out() == {2: 1.0}
    expected = {"eval/accuracy": 1.0, "loss": 0.5} | ({"seconds/publish": 1.0} if logged else {})
    assert {n: v for n, v in store.metrics(run_id)[2].items() if n != "step"} == expected
    assert 3 not in store.metrics(run_id)
