"""Preloading: a module that starts a thread is left to the attempts, its neighbours are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.runner.preload import StartedThreads, preload

PACKAGE = "a_package_with_a_thread"
STARTS = f"{PACKAGE}.store"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "calm.py").touch()
    (folder / "store.py").write_text(
        "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        module = sys.modules.pop(name)
        if name == STARTS:
            module.end.set()


def test_the_module_is_named() -> None:
    with pytest.raises(StartedThreads) as refused:
        preload([PACKAGE, f"{PACKAGE}.calm", STARTS])
    assert refused.value.module == STARTS


@pytest.mark.parametrize(("skip", "loaded"), [(STARTS, True), (PACKAGE, False)])
def test_what_is_skipped_and_what_is_not(skip: str, loaded: bool) -> None:
    preload([STARTS, f"{PACKAGE}.calm"], skip={skip})
    assert STARTS not in sys.modules
    assert (f"{PACKAGE}.calm" in sys.modules) is loaded
