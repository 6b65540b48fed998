"""The first file that another interpreter runs (``--python``): makes our two packages importable.

Executed by path, before anything of ours can be imported, so it imports the standard library only.
The interpreter's own packages stay its own: of ours it gets ``agentrl`` and ``agentrl_tracer``,
from where the runner has them, so both sides are of one version; OpenTelemetry it has itself.
"""

import importlib.machinery
import json
import sys


class OurPackages:
    """Finds some top-level packages in given folders and leaves everything else alone."""

    def __init__(self, folders):  # type: ignore[no-untyped-def]
        self._folders = folders

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self._folders:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [self._folders[name]], target)


if __name__ == "__main__":
    folders, report_fd, leash_fd = json.loads(sys.argv[1])
    sys.meta_path.insert(0, OurPackages(folders))  # type: ignore[arg-type]
    from agentrl.runner.attempt import run_foreign

    run_foreign(report_fd, leash_fd)
