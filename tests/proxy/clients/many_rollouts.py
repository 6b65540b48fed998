"""Many rollouts in one process, interleaved: run by test_propagation.py with claims on stdin.

Clients are made when this module is imported, outside any rollout; two more belong to the
first rollout by their base URL and key, as if it had cached them. Each rollout talks about its own
number only.
"""

import asyncio
import concurrent.futures
import functools
import json
import os
import queue
import random
import subprocess
import sys
import threading

import aiohttp
import httpx2
import openai
import requests
from opentelemetry import trace

from agentrl import emit, emit_reward
from agentrl_tracer.tracing import attributed, rollout_tracing, tracing

SYNC = openai.OpenAI(max_retries=0)
ASYNC = openai.AsyncOpenAI(max_retries=0)
POOL = concurrent.futures.ThreadPoolExecutor(5)
BASE = os.environ["OPENAI_BASE_URL"]
CACHED: list[openai.OpenAI] = []

CHILD = """
import os
from agentrl import emit_reward
emit_reward(int(os.environ["NUMBER"]), name="subprocess")
"""


def body(number, how):
    return {"model": "policy", "messages": [{"role": "user", "content": f"{number} {how}"}]}


def by_openai(number, how, client=None):
    (client or SYNC).chat.completions.create(**body(number, how))


def by_requests(number, how):
    requests.post(f"{BASE}/chat/completions", json=body(number, how)).raise_for_status()


def by_httpx2(number, how):
    httpx2.post(f"{BASE}/chat/completions", json=body(number, how), timeout=60).raise_for_status()


async def by_aiohttp(number, how):
    url = f"{BASE}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body(number, how)) as answer,
    ):
        answer.raise_for_status()
        await answer.read()


def in_span(number, name, call, *args):
    with trace.get_tracer("user").start_as_current_span(
        name, attributes={"number": number, "gen_ai.agent.name": f"agent {number}"}
    ):
        call(*args)


def rewarded_later(number, future):
    """A callback, in whatever thread."""
    emit_reward(number, name="callback")


async def agent(number):
    loop = asyncio.get_running_loop()
    await asyncio.sleep(random.random() / 20)
    with trace.get_tracer("user").start_as_current_span(
        "turn", attributes={"number": number, "gen_ai.agent.name": f"agent {number}"}
    ):
        await ASYNC.chat.completions.create(**body(number, "async"))
        emit_reward({"task": number})
    await asyncio.gather(
        by_aiohttp(number, "aiohttp"),
        loop.run_in_executor(POOL, in_span, number, "executor", by_openai, number, "executor"),
        asyncio.to_thread(in_span, number, "to_thread", by_httpx2, number, "to_thread"),
    )
    emit("thought", {"number": number})
    await asyncio.to_thread(threaded, number)


def threaded(number):
    done = queue.SimpleQueue()
    thread = threading.Thread(
        target=lambda: done.put(in_span(number, "thread", by_requests, number, "thread"))
    )
    thread.start()
    thread.join()
    done.get(timeout=0)
    future = POOL.submit(in_span, number, "pool", by_openai, number, "pool")
    future.add_done_callback(functools.partial(rewarded_later, number))
    future.result()
    by_openai(number, "cached", CACHED[number % 2])
    if number % 8 == 0:
        subprocess.run(
            [sys.executable, "-c", CHILD],
            check=True,
            env={**os.environ, "NUMBER": str(number)},
        )
    emit_reward(number, name="thread")


def attribution(claim):
    ids = {f"AGENTRL_{name.upper()}": claim[name] for name in ("rollout_id", "attempt_id", "key")}
    return attributed(ids | {"AGENTRL_GATEWAY": os.environ["AGENTRL_GATEWAY"]})


async def as_task(number, claim):
    with attribution(claim) as mine:
        with tracing("agent"):
            await agent(number)
        assert mine.rewarded
        assert await asyncio.to_thread(mine.finish)


def as_thread(number, claim):
    with attribution(claim) as mine:
        with tracing("agent"):
            threaded(number)
        assert mine.rewarded
        assert mine.finish()


async def main(claims):
    with attribution(claims[0]):
        rollout_tracing().router.install_globally()
    for claim in claims[:2]:
        base = f"{os.environ['AGENTRL_GATEWAY']}/rollouts/{claim['rollout_id']}/v1"
        CACHED.append(openai.OpenAI(base_url=base, api_key=claim["key"], max_retries=0))
    threads = [
        threading.Thread(target=as_thread, args=(number, claim))
        for number, claim in enumerate(claims)
        if number % 2
    ]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(as_task(n, claim) for n, claim in enumerate(claims) if n % 2 == 0))
    for thread in threads:
        await asyncio.to_thread(thread.join)


asyncio.run(main(json.load(sys.stdin)))
