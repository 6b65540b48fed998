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


def run(report_fd, leash_fd):  # type: ignore[no-untyped-def]
    """Run attempts; standard input holds the configuration and the first job, a line each."""
    from agentrl.runner.agent_process.attempt import run_attempts
    from agentrl.runner.agent_process.concurrent import run_concurrent_attempts
    from agentrl.runner.protocol import AttemptJob, RunnerConfig

    config = RunnerConfig.from_json(sys.stdin.readline())
    for fd in (report_fd, leash_fd):
        os.set_inheritable(fd, False)
    if config.concurrency > 1:
        run_concurrent_attempts(config, report_fd, leash_fd)
    job = AttemptJob.from_line(sys.stdin.readline().encode())
    run_attempts(config, job, report_fd, leash_fd, known_modules=None)


if __name__ == "__main__":
    folders, report_fd, leash_fd = json.loads(sys.argv[1])
    sys.meta_path.insert(0, OurPackages(folders))  # type: ignore[arg-type]
    run(report_fd, leash_fd)
