"""Model calls that come through, and others that raise or are canceled, by several clients."""

import asyncio
import contextlib
import os
import time

import aiohttp
import httpx
import httpx2
import requests

BASE = os.environ["OPENAI_BASE_URL"]
URL = f"{BASE}/chat/completions"
HEADERS = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


def body(how, stream=False):
    return {
        "model": "policy",
        "stream": stream,
        "messages": [{"role": "user", "content": how}],
    }


def refuse(*_, **__):
    raise RuntimeError("the agent's own hook")


def read_at_once(http, name):
    with http.Client(headers=HEADERS) as client:
        client.post(URL, json=body(f"{name} read"))
        with client.stream("POST", URL, json=body(f"{name} stream read", stream=True)) as answer:
            for line in answer.iter_lines():
                if "[DONE]" in line:
                    break
    hooks = {"response": [refuse]}
    with (
        http.Client(headers=HEADERS, event_hooks=hooks) as client,
        contextlib.suppress(RuntimeError),
    ):
        client.post(URL, json=body(f"{name} raised"))


def by_requests():
    requests.post(URL, json=body("requests read"), headers=HEADERS)
    with requests.post(
        URL, json=body("requests stream read", stream=True), headers=HEADERS, stream=True
    ) as answer:
        assert any(b"[DONE]" in line for line in answer.iter_lines())
    with contextlib.suppress(RuntimeError):
        requests.post(
            URL, json=body("requests raised"), headers=HEADERS, hooks={"response": refuse}
        )


async def canceled(http, name):
    async with http.AsyncClient(headers=HEADERS, verify=False) as client:
        await client.post(URL, json=body(f"{name} canceled"))


async def canceled_stream(http, name):
    async with (
        http.AsyncClient(headers=HEADERS, verify=False) as client,
        client.stream("POST", URL, json=body(f"{name} stream canceled", stream=True)) as answer,
    ):
        async for _ in answer.aiter_raw():
            pass


async def by_aiohttp():
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.post(URL, json=body("aiohttp read")) as answer:
            await answer.json()
        async with session.post(URL, json=body("aiohttp canceled")) as answer:
            await answer.json()


async def give_up():
    """Cancel calls whose whole answers lie in the process's buffers already."""
    both = [(httpx, "httpx"), (httpx2, "httpx2")]
    tasks = [asyncio.create_task(by_aiohttp())]
    tasks += [asyncio.create_task(canceled(*one)) for one in both]
    tasks += [asyncio.create_task(canceled_stream(*one)) for one in both]
    await asyncio.sleep(0.6)  # every request is under way
    time.sleep(2.5)  # noqa: ASYNC251
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(task):
    read_at_once(httpx, "httpx")
    read_at_once(httpx2, "httpx2")
    by_requests()
    asyncio.run(give_up())
    return 1.0
