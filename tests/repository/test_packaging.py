"""The wheel: what is in it, that its base installs, and what each extra resolves to."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def uv(*arguments: str, given: str | None = None) -> str:
    command = [sys.executable, "-m", "uv", *arguments]
    return subprocess.run(
        command, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "-q", "--wheel", "--out-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"agentrl", "agentrl_proxy", "agentrl_tracer", "agentrl_trainer"}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert "agentrl_trainer/tiny/weights/model.safetensors" in names
    assert not [name for name in names if re.search(r"corpus|pretrain|training_log|test", name)]


def test_the_base_installs_into_a_fresh_environment_and_emits(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")
    uv("pip", "install", "-q", "--python", python, str(wheel))
    code = "import agentrl; agentrl.emit_reward(1.0); print(agentrl.__version__)"
    run = [python, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert done.stdout.strip() == version[1]


def test_no_extra_installs_the_other_agentrl_of_the_package_index(wheel: Path) -> None:
    """``agentrl`` on PyPI is another project; no extra may install it, directly or indirectly."""
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "agentrl-middleware"
    # `dev` holds all others but these; one resolution is enough for each set.
    for extras in (["dev"], sorted(set(metadata.get_all("Provides-Extra") or []) - {"dev"})):
        wanted = f"agentrl-middleware[{','.join(extras)}] @ {wheel.as_uri()}"
        found = uv("pip", "compile", "-q", "--no-header", "--no-annotate", "-", given=wanted)
        resolved = {re.split(r"[ =@\[]", line)[0] for line in found.splitlines()}
        assert {"agentrl-middleware", "opentelemetry-sdk"} <= resolved
        assert "agentrl" not in resolved
