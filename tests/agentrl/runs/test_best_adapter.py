"""The best adapters of a run: which step, their copy, and what commands say of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agentrl.config.errors import ConfigError
from agentrl.runs.best_adapter import (
    best_step,
    best_step_of,
    held_out_of,
    keep_best,
    which_adapter,
)
from agentrl.runs.folder import RunFolder, find_adapters


def run_of(root: Path, held_out: dict[int, float], *names: str) -> RunFolder:
    folder = RunFolder(root / "run")
    folder.root.mkdir()
    folder.config.write_text("{}")
    for step in range(4):
        for name in names:
            version = folder.adapter_version(name, step)
            version.mkdir(parents=True)
            (version / "adapter_config.json").write_text(f'{{"of": "{name}@{step}"}}')
    for step, accuracy in held_out.items():
        folder.append_metrics({"step": step, "eval/accuracy": accuracy})
    return folder


def content(folder: RunFolder) -> dict[str, str]:
    """What ``RUN@best`` means."""
    found = find_adapters(f"{folder.root}@best", "x")
    return {name: (path / "adapter_config.json").read_text() for name, path in found.items()}


def test_the_earliest_of_equal_ones_is_best() -> None:
    assert best_step({0: 0.1, 5: 0.5, 10: 0.5, 15: 0.3}) == 5
    assert best_step({}) is None


@pytest.mark.parametrize("names", [("policy",), ("asker", "answerer")])
def test_the_copy_has_the_layout_of_adapter_and_survives_its_version(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    folder = run_of(tmp_path, {0: 0.1, 2: 0.5}, *names)
    keep_best(folder, names, best_step(held_out_of(folder)))
    expected = {name: f'{{"of": "{name}@2"}}' for name in names}
    assert content(folder) == expected
    sole = len(names) == 1
    assert (folder.best_adapter / "adapter_config.json").is_file() == sole
    assert (folder.best_adapter / names[-1] / "adapter_config.json").is_file() != sole
    assert set(find_adapters(folder.best_adapter, "x")) == ({"adapter-best"} if sole else {*names})
    keep_best(folder, names, 1)
    assert content(folder) == {name: f'{{"of": "{name}@1"}}' for name in names}
    for name in names:
        shutil.rmtree(folder.adapter_version(name, 1))
    keep_best(folder, names, 1)  # as at each resume
    assert content(folder) == {name: f'{{"of": "{name}@1"}}' for name in names}
    keep_best(folder, names, None)
    with pytest.raises(ConfigError, match=r"has no best adapter, .*evaluation\.tasks"):
        content(folder)


def test_commands_say_which_adapter_it_is(tmp_path: Path) -> None:
    folder = run_of(tmp_path, {0: 0.1, 2: 0.5, 3: 0.25}, "policy")
    keep_best(folder, ["policy"], 2)

    def said(source: str) -> str | None:
        return which_adapter(source, find_adapters(source, "x"))

    root = folder.root
    assert said(f"{root}") == (
        f"{root}: the newest adapter, of step 3, held-out accuracy 25.0%; the best was 50.0% at "
        f"step 2: --adapter-path {root}@best"
    )
    assert said(f"{root}@best") == f"{root}: the best adapter, of step 2, held-out accuracy 50.0%"
    assert said(f"{root}@2") == f"{root}: the adapter of step 2, held-out accuracy 50.0%"
    assert (said(f"{root}@1") or "").startswith(f"{root}: the adapter of step 1; the best was 50")
    assert said(str(folder.adapter_version("policy", 1))) is None
    assert which_adapter(None, {}) is None
    os.remove(folder.metrics)
    assert said(f"{root}") == f"{root}: the newest adapter, of step 3"
    for step, loss in {0: None, 2: 0.43, 3: 2.5}.items():  # of agentrl sft
        folder.append_metrics({"step": step, "eval/loss": loss})
    assert said(f"{root}") == (
        f"{root}: the newest adapter, of step 3, held-out loss 2.5000; the best was 0.4300 at "
        f"step 2: --adapter-path {root}@best"
    )
    assert best_step_of(folder) == 2
