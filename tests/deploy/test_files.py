"""The files of deploy/ agree with the schemas of the programs that read them.

KubeRay's resources have no schema on PyPI: the pods in them are checked as core pods.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        "check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.cuda.yaml",
        "hadolint --ignore DL3008 Dockerfile",  # Debian keeps no old versions of its packages
        "shellcheck train.slurm",
    ],
    ids=lambda command: command.split()[0],
)
def test_a_linter_finds_nothing(command: str) -> None:
    program, *arguments = command.split()
    done = subprocess.run(
        [BIN / program, *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def manifests() -> list[dict[str, Any]]:
    files = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    texts = [(DEPLOY / "kubernetes" / file).read_text() for file in files]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def test_the_manifests_and_the_pods_of_ray_are_valid() -> None:
    kinds = []
    for manifest in manifests():
        kinds.append(manifest["kind"])
        if manifest["kind"] != "RayJob":
            kubernetes_validate.validate(manifest, "1.37", strict=True)
            continue
        cluster = manifest["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
            kubernetes_validate.validate(pod | group["template"], "1.37", strict=True)
    assert sorted(kinds) == ["PersistentVolumeClaim", "RayJob", "Service", "StatefulSet"]
