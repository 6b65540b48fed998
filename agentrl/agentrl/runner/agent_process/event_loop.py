"""Keep one event loop for the rollouts that take turns in a process.

An async client that a module makes once (``AsyncOpenAI()``, a framework's default client) has
connections that belong to a loop. On a new loop for every rollout its next request would fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from agentrl.runner.agent_spec import awaited


class KeptLoop:
    """An event loop that outlives rollouts. As with ``asyncio.run``, their tasks end with them."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run a rollout's agent to its end.

        Then cancel the tasks that it left, and wait for its jobs of the loop's default executor:
        they would go on under the next rollout's name.
        """
        loop = self._runner.get_loop()
        with ThreadPoolExecutor(thread_name_prefix="asyncio") as jobs:
            loop.set_default_executor(jobs)
            try:
                return self._runner.run(awaited(awaitable), context=copy_context())
            finally:
                loop.run_until_complete(_cancel_others())


async def _cancel_others() -> None:
    """Cancel every other task of this loop; what they raise is theirs."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
