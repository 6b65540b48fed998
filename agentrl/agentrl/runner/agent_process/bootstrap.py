"""Run attempts in another interpreter (``--python``).

Executed by path, before any package of ours can be imported, so it imports the standard library
only. That interpreter gets ``agentrl`` and ``agentrl_tracer`` from where the runner has them, so
that both sides are of one version; every other package is its own.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any

if __name__ == "__main__":
    our_folders, worker_fd = json.loads(sys.argv[1])
    for name, folder in our_folders.items():
        spec: Any = importlib.machinery.PathFinder.find_spec(name, [folder])
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    from agentrl.process_privacy import hide_memory
    from agentrl.runner.agent_process.attempts import run_attempts
    from agentrl.runner.protocol import RunnerConfig

    hide_memory()
    os.set_inheritable(worker_fd, False)
    with open(worker_fd, "rb", buffering=0, closefd=False) as worker:
        config = RunnerConfig.from_json(worker.readline())  # the worker sends it first
    run_attempts(config, worker_fd, known_modules=None)
