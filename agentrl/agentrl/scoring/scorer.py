"""Compute the rewards of finished rollouts, many at a time, and store them.

Functions run on threads of this process, and async ones on one event loop. All rewards of a group
are stored in one transaction. What a function does not say, because it raised or returned no
finite number, is stored as a reward that does not train; the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby
from typing import Any

from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.trace import Trace, read_traces
from agentrl_tracer.schemas import (
    POLICY_REWARD_KEY,
    REWARD_RANGE,
    Reward,
    Rollout,
    is_reward,
)

_AT_ONCE = 16
"""Calls of functions that run at a time."""
_GROUPS_AT_ONCE = 32
"""Groups whose traces are in memory."""
_FAREWELL_S = 2.0  # for what is given up to end
OnProgress = Callable[[int, int], object]
"""Called with the numbers of scored and of all groups."""


class RefusedScoreError(ValueError):
    """A function returned what is no reward."""


class Scorer:
    """Scores groups of rollouts in the background, each once.

    Args:
        again: score rollouts that have their rewards, too, and replace these.
        alone: set other rewards of the rollouts aside.
        wait: waits for a future, and does what must be done meanwhile.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        context: ScoringContext,
        *,
        again: bool = False,
        alone: bool = False,
        wait: Callable[[Future[None]], object] = Future[None].result,
    ) -> None:
        self.functions = functions
        self.seen = 0
        """Rollouts that the functions were given."""
        self.replaced = 0
        """Rewards of earlier scores."""
        self._context, self._again, self._alone, self._wait = context, again, alone, wait
        self._under_way: dict[str, Future[None]] = {}
        self._faults: Counter[tuple[str, str]] = Counter()  # by function and error
        self._examples: dict[tuple[str, str], str] = {}
        self._told: Counter[tuple[str, str]] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread
        self._closed: asyncio.Event
        self._threads = ThreadPoolExecutor(_AT_ONCE, "rewards")
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._groups = asyncio.Semaphore(_GROUPS_AT_ONCE)
        for function in functions:
            function.connect(context)

    # ---- the trainer's thread

    def begin(self, group: Sequence[str]) -> None:
        """Begin to score the rollouts of a finished group, unless that was begun before."""
        if not self.functions or not group or group[0] in self._under_way:
            return
        if self._loop is None:
            started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(_serve(started)), name="rewards", daemon=True
            )
            self._thread.start()
            self._loop, self._closed = started.result()
        score = self._score(list(group))
        self._under_way[group[0]] = asyncio.run_coroutine_threadsafe(score, self._loop)

    def finish(self, groups: Iterable[Sequence[str]], on_progress: OnProgress) -> None:
        """Return when the rewards of these groups are stored; note what went wrong."""
        found = [group for group in groups if group] if self.functions else []
        for group in found:
            self.begin(group)
        for at, group in enumerate(found):
            on_progress(at, len(found))
            self._wait(self._under_way[group[0]])
            del self._under_way[group[0]]
        self._tell()

    def score(self, rollouts: Sequence[Rollout], on_progress: OnProgress) -> None:
        """Score rollouts, of which those of a group follow each other."""
        groups = groupby(rollouts, key=lambda one: one.group_id)
        self.finish([[one.id for one in members] for _, members in groups], on_progress)

    def take_metrics(self) -> dict[str, float]:
        """Return what the functions have counted since the last time."""
        takers = (getattr(one.call, "take_metrics", None) for one in self.functions)
        return dict(chain.from_iterable(take().items() for take in takers if take))

    def close(self) -> None:
        """Give up what is under way, and say how often functions failed in all."""
        self._tell(last=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(_FAREWELL_S)

    def _tell(self, *, last: bool = False) -> None:
        """Note each kind of failure once it occurs, and in the end how often it occurred."""
        for kind, count in list(self._faults.items()):
            told, name = self._told[kind], kind[0]
            if not told or (last and count > told):
                in_all = " in all" if told else ""
                said = f"{name} gave {count} rollouts no reward{in_all}: {self._examples[kind]}"
                self._context.note(f"rewards: {said}")
            self._told[kind] = self._told[kind] or count

    # ---- the event loop

    async def _score(self, group: Sequence[str]) -> None:
        async with self._groups:
            traces = await asyncio.to_thread(self._read, group)
            self.seen += len(traces)
            results = [self._apply(function, traces) for function in self.functions]
            by_function = await asyncio.gather(*results)
            replaced = await asyncio.to_thread(self._keep, traces, by_function)
            self.replaced += replaced

    def _read(self, group: Sequence[str]) -> list[Trace]:
        """Read the traces, without those whose attempt failed and was rewarded by a policy."""
        store = self._context.store
        traces = read_traces(store, store.rollouts(self._context.run_id, ids=group))
        return [
            trace
            for trace in traces
            if all(reward.key != POLICY_REWARD_KEY for reward in trace.rewards)
        ]

    def _keep(self, traces: Sequence[Trace], by_function: Sequence[Sequence[list[Reward]]]) -> int:
        """Store the rewards of each rollout in the order of the functions; count replaced ones."""
        scores = [*chain.from_iterable(chain.from_iterable(zip(*by_function, strict=True)))]
        attempts, names = [one.attempt_id for one in traces], [one.name for one in self.functions]
        return self._context.store.set_scores(attempts, names, scores, alone=self._alone)

    async def _apply(
        self, function: RewardFunction, traces: Sequence[Trace]
    ) -> Sequence[list[Reward]]:
        """Return what a function gives each rollout."""
        earlier = [[] if self._again else _earlier(function, trace) for trace in traces]
        if all(earlier):
            return earlier
        if function.compares_group:
            return await self._score_group(function, traces)
        pairs = zip(traces, earlier, strict=True)
        one_by_one = [self._score_one(function, trace, known) for trace, known in pairs]
        return await asyncio.gather(*one_by_one)

    async def _score_group(
        self, function: RewardFunction, traces: Sequence[Trace]
    ) -> list[list[Reward]]:
        try:
            results = list(await self._call(function, list(traces)))
            if len(results) != len(traces):
                raise RefusedScoreError(f"{len(results)} results for {len(traces)} rollouts")
        except (Exception, SystemExit) as error:
            return [self._refused(function, trace, error) for trace in traces]
        pairs = zip(traces, results, strict=True)
        return [self._rewards(function, trace, result) for trace, result in pairs]

    async def _score_one(
        self, function: RewardFunction, trace: Trace, known: list[Reward]
    ) -> list[Reward]:
        if known:
            return known
        try:
            result = await self._call(function, trace)
        except (Exception, SystemExit) as error:
            return self._refused(function, trace, error)
        return self._rewards(function, trace, result)

    async def _call(self, function: RewardFunction, given: Trace | list[Trace]) -> Any:
        async with self._calls:
            if function.is_async:
                return await function.call(given)
            loop = asyncio.get_running_loop()
            result: Any = await loop.run_in_executor(self._threads, function.call, given)
            return await result if inspect.isawaitable(result) else result

    # ---- results

    def _rewards(self, function: RewardFunction, trace: Trace, result: Any) -> list[Reward]:
        """Return a result as rewards: of a mapping each by its key, of None nothing."""
        named = result if isinstance(result, Mapping) else {function.name: result}
        try:
            numbers = {} if result is None else {str(k): _number(x) for k, x in named.items()}
        except Exception as error:  # of any object's own ``__float__``
            return self._refused(function, trace, error)
        return [_reward(function, trace, name, number) for name, number in numbers.items()]

    def _refused(
        self, function: RewardFunction, trace: Trace, error: BaseException
    ) -> list[Reward]:
        """Count a failure. Its reward is infinite, so that the rollout's others do not train it."""
        lines = str(error).strip().splitlines() or [""]
        said = f"{type(error).__name__}: {lines[0][:300]}"
        kind = function.name, type(error).__name__
        self._faults[kind] += 1
        self._examples.setdefault(kind, said)
        return [_reward(function, trace, function.name, math.inf, said)]


async def _serve(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Keep a loop running until the event is set."""
    closed = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), closed))
    await closed.wait()


def _number(value: Any) -> float:
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if not is_reward(number):
        raise RefusedScoreError(f"it returned {value!r}, and {REWARD_RANGE}")
    return number


def _reward(
    function: RewardFunction, trace: Trace, name: str, value: float, why: str | None = None
) -> Reward:
    key = f"{function.keys}{name}"
    return Reward(trace.attempt_id, trace.rollout_id, name, value, key, explanation=why)


def _earlier(function: RewardFunction, trace: Trace) -> list[Reward]:
    """Return the rewards that a function gave before; none if it had failed."""
    found = [one for one in trace.rewards if one.key.startswith(function.keys)]
    return found if all(is_reward(one.value) for one in found) else []
