"""Agent-lightning 0.3's LLM proxy with its in-memory store, over the instant mock.

    BENCHMARK_ANSWER=answer.json python agentlightning_proxy.py <port> <rollouts> <targets file>

Writes (path, key) of its rollouts to the targets file when it is ready; on SIGUSR1 it writes beside
it how many spans its store holds, by name.

In ``thread`` mode: the store and the proxy share a process, as they need not talk HTTP then. The
proxy's defaults otherwise: token ids and OpenTelemetry callbacks, streams converted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import litellm
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import InMemoryLightningStore
from litellm.utils import custom_llm_setup
from litellm_mock import instant


async def main(port: int, rollouts: int, targets: str) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    paths, started_ids = [], []
    for n in range(rollouts):
        started = await store.start_rollout(input={"n": n})
        place = f"/rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}"
        paths.append((f"{place}/v1/chat/completions", "sk-benchmark"))
        started_ids.append(started.rollout_id)
    proxy = LLMProxy(
        port=port,
        host="127.0.0.1",
        launch_mode="thread",
        store=store,
        model_list=[{"model_name": "policy", "litellm_params": {"model": "instant/policy"}}],
        litellm_config={"litellm_settings": {"drop_params": True}},
    )
    # Here and not in the config: that one looks for the module beside a temporary file.
    litellm.custom_provider_map = [{"provider": "instant", "custom_handler": instant}]
    custom_llm_setup()
    await proxy.start()
    _write(targets, paths)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked.set)
    await asked.wait()
    names: Counter[str] = Counter()
    for rollout_id in started_ids:
        names.update(span.name for span in await store.query_spans(rollout_id))
    _write(targets.removesuffix(".json") + ".counted", {"spans": dict(names)})
    await asyncio.Event().wait()


def _write(path: str, value: Any) -> None:
    """Whole or not at all: who waits for the file reads it as soon as it is there."""
    with open(path + ".part", "w") as file:
        json.dump(value, file)
    os.rename(path + ".part", path)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
