"""A training of a trial as a Ray job, which waits until a node has room for it.

This process is the job's driver. Ray ends the job when the driver is gone, and the training ends
with the job's worker. The sweep starts a training again that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from agentrl.console.output import print_line
from agentrl.sweep.process import start

_POLL_S = 0.5
_KILLED = 137


def main(job: dict[str, Any], command: list[str]) -> int:
    """Run the command on a node; return its exit status."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        return _refuse(f"sweep.ray: no Ray cluster answers; `ray start --head` starts one: {error}")
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and not job["nodes_share_store"]:
        return _refuse(
            f"run.store: the Ray cluster has {nodes} nodes, which cannot share an SQLite file; "
            "give a PostgreSQL URL with --run.store"
        )
    resources: dict[str, float] = dict(job["resources"])
    place = {
        "num_cpus": resources.pop("CPU", 1), "num_gpus": resources.pop("GPU", 0),
        "resources": resources, "max_retries": 0,
    }  # fmt: skip
    task = ray.remote(**place)(_train).remote(command, os.getcwd(), dict(os.environ), job["log"])
    signal.signal(signal.SIGTERM, _end)
    try:
        return ray.get(task)
    except SystemExit:
        ray.cancel(task)
        ray.wait([task])
        raise
    except ray.exceptions.RayError as error:
        print_line(f"the job's worker died: {error}")
        return _KILLED


def _train(command: list[str], folder: str, sent: dict[str, str], log: str) -> int:
    """Train in a process of this node, on the worker's devices; end it in order if canceled."""
    environment = sent | os.environ  # the node's own, such as the devices that Ray chose
    if "PYTHONPATH" in sent:
        environment["PYTHONPATH"] = sent["PYTHONPATH"]
    with start("agentrl.sweep.process", command, Path(log), folder, environment) as process:
        try:
            while process.poll() is None:  # Ray interrupts Python, not a system call
                time.sleep(_POLL_S)
        finally:
            process.terminate()
            process.wait()
    return process.returncode


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _refuse(why: str) -> int:
    print_line(f"error: {why}")
    return 1


if __name__ == "__main__":
    from agentrl.supervisor import end_with_parent

    end_with_parent()
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
