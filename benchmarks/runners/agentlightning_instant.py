"""Instant rollouts by Agent-lightning 0.3's Trainer; run with the interpreter of its own venv.

Prints one JSON line: seconds until the first rollouts had ended, rollouts per second after that,
and what each cost in CPU, its store's and runners' processes included.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import agentlightning as agl
from cpu import cpu_seconds


@agl.rollout
def instant(task: dict, llm: agl.LLM) -> float:
    return float(task["n"])


class Count(agl.Algorithm):
    """Enqueues everything and waits for it: no learning."""

    async def run(self, train_dataset=None, val_dataset=None) -> None:  # type: ignore[no-untyped-def]
        store = self.get_store()
        await store.add_resources(self.get_initial_resources())
        tasks = list(train_dataset or [])
        warm = [await store.enqueue_rollout(input=tasks[0], mode="train") for _ in range(8)]
        await self._finish(store, [one.rollout_id for one in warm])
        root = int(os.environ["AGENTRL_BENCHMARK_ROOT"])
        ready = time.time() - float(os.environ["AGENTRL_BENCHMARK_START"])
        started, before = time.perf_counter(), cpu_seconds(root)
        ids = [(await store.enqueue_rollout(input=t, mode="train")).rollout_id for t in tasks]
        await self._finish(store, ids)
        seconds = time.perf_counter() - started
        found = {
            "ready_s": round(ready, 2),
            "rollouts_per_s": round(len(ids) / seconds, 1),
            "cpu_ms_per_rollout": round((cpu_seconds(root) - before) * 1000 / len(ids), 1),
        }
        print(json.dumps(found), flush=True)

    async def _finish(self, store, ids) -> None:  # type: ignore[no-untyped-def]
        while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0.0)) < len(ids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # its store has no event to wait for


if __name__ == "__main__":
    os.environ["AGENTRL_BENCHMARK_ROOT"] = str(os.getpid())
    runners, rollouts = int(sys.argv[1]), int(sys.argv[2])
    nowhere = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="none")  # never called
    trainer = agl.Trainer(n_runners=runners, algorithm=Count(), initial_resources={"llm": nowhere})
    trainer.fit(instant, train_dataset=[{"n": i} for i in range(rollouts)])
