"""An environment for each framework, made with uv and removed after its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_frameworks import FRAMEWORKS
from running_gateway import WEIGHTS, running
from scripted_sampler import Running

ROOT = Path(__file__).parents[2]
# Environment variable: keep the environments in this folder, and use those that are there.
KEEP = "AGENTRL_TEST_FRAMEWORKS_KEEP"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "frameworks" not in config.getoption("-m"):  # twenty minutes: only if asked for
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="make frameworks"))


def uv(*arguments: str) -> None:
    """Run uv; skip the test if the package index cannot be reached."""
    done = subprocess.run([sys.executable, "-m", "uv", *arguments], capture_output=True, text=True)
    if done.returncode:
        if "Failed to fetch" in done.stderr or "dns error" in done.stderr:
            pytest.skip(f"the package index cannot be reached: {done.stderr[-300:]}")
        pytest.fail(f"uv {' '.join(arguments)}: {done.stderr[-2000:]}")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "-q", "--wheel", "--out-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def python(framework: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of the framework's environment, which has the wheel's base or tracing."""
    kept = os.environ.get(KEEP)
    folder = Path(kept) / framework if kept else tmp_path_factory.mktemp(framework) / "env"
    needed = FRAMEWORKS[framework]
    interpreter = str(folder / "bin/python")
    if not folder.exists():
        uv("venv", "-q", "--python", sys.executable, str(folder))
    extra = "[tracing]" if needed.tracing else ""
    ours = f"agentrl-middleware{extra} @ {wheel.as_uri()}"
    again = ("--reinstall-package", "agentrl-middleware")
    uv("pip", "install", "-q", "--python", interpreter, *again, ours, *needed.requirements.split())
    yield interpreter
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    from transformers import AutoTokenizer

    from agentrl_proxy.rendering.renderer import Renderer

    renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
    with running(tmp_path, renderer, {}, context_length=32768) as started:
        yield started
