"""The environment in which verl computes on CPUs: see ``verl_cpu``."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}
