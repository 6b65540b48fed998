"""What a process keeps from others of its user: memory, arguments, files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.runs.folder import RunFolder
from agentrl_tracer.store import Store

SAYS = "import sys\nfrom agentrl.process_privacy import *\nhide_arguments(sys.argv[1:])\n"
ARGUMENTS = [
    "--run.store", "postgresql://me:hunter2@host/agentrl", "--gateway.operator-key", "sk-hunter2",
    "--api-key=tml-hunter2", "postgresql://host/x?user=me&password=hunter2", "kept",
]  # fmt: skip


def test_no_key_stays_among_the_arguments() -> None:
    command = [sys.executable, "-c", f"{SAYS}print(flush=True)\nsys.stdin.read()", *ARGUMENTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        process.communicate()
    assert "hunter2" not in "".join(said)
    assert said[-2] == "kept"
    assert "postgresql://me:*******@host/agentrl" in said
    assert "postgresql://host/x?user=me&password=*******" in said


def test_a_runs_files_are_its_owners(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = RunFolder.create(tmp_path / "runs", "one", "train")
        folder.lock()
        folder.write_json(folder.config, {})
        folder.write(folder.run_id, "id")
        folder.append_metrics({"step": 1})
        folder.drop_metrics_after(0)
        store = Store(str(folder.store))
        store.create_run("one", "train", {})
        paths = [folder.root, *folder.root.rglob("*")]
        assert {path.name for path in paths} >= {
            "store.db",
            "store.db-wal",
            "store.db-queue",
            "lock",
        }
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("readers", "root", "dirs", "files"),
    [
        ("owner", 0o700, 0o700, 0o600),
        ("group", 0o710, 0o750, 0o640),
        ("everyone", 0o711, 0o755, 0o644),
    ],
)
def test_another_users_vllm_reads_adapters_and_nothing_else(
    tmp_path: Path, readers: str, root: int, dirs: int, files: int
) -> None:
    folder = RunFolder.create(tmp_path / "runs", "one", "train")
    folder.write_json(folder.config, {})
    adapter = folder.adapter_version("policy", 1)
    for path in (folder.adapters, adapter.parent, adapter):
        path.mkdir(mode=0o700)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_config.json").chmod(0o600)
    folder.share_adapter(adapter, readers)  # type: ignore[arg-type]
    assert folder.root.stat().st_mode & 0o777 == root
    for path in (folder.adapters, adapter.parent, adapter):
        assert path.stat().st_mode & 0o777 == dirs
    assert (adapter / "adapter_config.json").stat().st_mode & 0o777 == files
    assert folder.config.stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0 and readers == "everyone":
        for path in (tmp_path, *list(tmp_path.parents)[:3]):
            path.chmod(path.stat().st_mode | 0o011)
        how = {"user": 65534, "group": 65534, "extra_groups": []}
        reads = [
            subprocess.run(["cat", str(path)], capture_output=True, check=False, **how).returncode  # type: ignore[call-overload]
            for path in (adapter / "adapter_config.json", folder.config)
        ]
        assert reads[0] == 0
        assert reads[1] != 0
