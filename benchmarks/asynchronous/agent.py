"""The hello agent with slow tools: its game takes as long as a search or a browser would.

Latencies are exponential, so that of many rollouts a few take several times the mean: those that a
synchronous step waits for.
"""

import asyncio
import os
import random

from openai import AsyncOpenAI

from agentrl import emit_reward

_MEAN_S = float(os.environ.get("AGENTRL_BENCH_LATENCY", "1.0"))
_random = random.SystemRandom()  # a forked process would repeat another's numbers


async def agent(task: dict) -> None:
    n = task["n"]
    await asyncio.sleep(min(_random.expovariate(1 / _MEAN_S), 6 * _MEAN_S))
    async with AsyncOpenAI() as client:
        answer = await client.chat.completions.create(
            model=os.environ["AGENTRL_MODEL"],
            messages=[{"role": "user", "content": f"Let's play a game. Say you are {n}."}],
            max_tokens=32,
        )
    reply = (answer.choices[0].message.content or "").lower()
    said = f"i am {n}" in reply or f"i'm {n}" in reply
    emit_reward(1.0 if said else -1.0 if f"not {n}" in reply else 0.0)
