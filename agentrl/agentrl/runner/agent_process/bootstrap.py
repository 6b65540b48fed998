"""Make our packages importable in another interpreter (``--python``), and run attempts there.

Executed by path, before any package of ours can be imported, so it imports the standard library
only. That interpreter gets ``agentrl`` and ``agentrl_tracer`` from where the runner has them, so
that both sides are of one version; every other package is its own.
"""

import importlib.machinery
import json
import os
import sys


class OurPackages:
    """Finds some top-level packages in given folders, and nothing else."""

    def __init__(self, folders):  # type: ignore[no-untyped-def]
        self._folders = folders

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self._folders:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [self._folders[name]], target)


def run(worker_fd):  # type: ignore[no-untyped-def]
    """Run attempts; the worker first sends the configuration."""
    from agentrl.runner.agent_process.attempts import run_attempts
    from agentrl.runner.protocol import RunnerConfig

    os.set_inheritable(worker_fd, False)
    with open(worker_fd, "rb", buffering=0, closefd=False) as worker:
        config = RunnerConfig.from_json(worker.readline())
    run_attempts(config, worker_fd, known_modules=None)


if __name__ == "__main__":
    folders, worker_fd = json.loads(sys.argv[1])
    sys.meta_path.insert(0, OurPackages(folders))  # type: ignore[arg-type]
    run(worker_fd)
