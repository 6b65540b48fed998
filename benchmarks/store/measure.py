"""Measure what a run asks of a large store; print seconds as JSON.

Reads are the best of three: the file cache is warm. What a resume changes is measured last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_tracer.schemas import Policies, Purpose
from agentrl_tracer.store import Store

url, run_id, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
store = Store(url)
figures: dict[str, float] = {}


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def best(name: str, work: Callable[[], Any]) -> None:
    figures[name] = min(seconds(work) for _ in range(3))


def longest_wait_of_a_writer(work: Callable[[], Any]) -> float:
    """Return the longest wait of another process's writes while ``work`` is done."""
    other, longest, done = Store(url), 0.0, threading.Event()

    def write() -> None:
        nonlocal longest
        while not done.is_set():
            longest = max(longest, seconds(lambda: other.log_metrics(run_id, 0, {"x": 1.0})))
            time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    work()
    done.set()
    writer.join()
    other.close()
    return longest


steps = max(r for r in store.metrics(run_id)) + 1
ids = [rollout.id for rollout in store.rollouts(run_id, step=steps)]
best("accounting of a step", lambda: store.accounting(run_id))
figures["a writer's longest wait meanwhile"] = longest_wait_of_a_writer(
    lambda: [store.accounting(run_id) for _ in range(3)]
)
best("read a step's 5,000 calls", lambda: store.calls(rollout_ids=ids, bodies=False))
best("poll a step", lambda: store.unfinished_ids(run_id, Purpose.TRAIN, since_step=steps))
figures["verify"] = seconds(lambda: store.verify(run_id))
figures["a writer's longest wait during verify"] = longest_wait_of_a_writer(
    lambda: store.verify(run_id)
)
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(json.dumps({"run": {"store": url}}))
(folder / "run_id").write_text(run_id)
show = [sys.executable, "-m", "agentrl", "runs", "show", str(folder)]
best("runs show", lambda: subprocess.run(show, check=True, stdout=subprocess.DEVNULL))


def resume() -> None:
    """What ``agentrl train --resume`` asks of the store before its first rollout."""
    again = Store(url)
    again.tasks(run_id, "train")
    again.resume_run(run_id, {}, Policies())
    again.cancel(run_id, "the run was resumed")
    again.register_gateway("again", run_id, 2)
    again.latest_adapters(run_id)
    again.cancel(run_id, "the run was resumed", after_step=steps - 1, evaluated=True)
    again.supersede(run_id, after_step=steps - 1)
    again.drop_adapters_after(run_id, steps - 1)
    again.drop_metrics_after(run_id, steps - 1)
    again.close()


figures["resume"] = seconds(resume)
print(json.dumps(figures))
