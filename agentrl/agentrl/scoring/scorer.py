"""Compute the rewards of finished rollouts, many at a time, and store them.

Each call of a function has a thread of its own; async functions run on one event loop of the
process. All rewards of a group are stored in one transaction. What a function does not say, because
it raised or returned no finite number, is stored as a reward that does not train; the run goes on.

A function that computes on the CPU (``takes_cores``) waits for ``finish``: before that the sampler
and the trainer use the cores.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from typing import Any

from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.trace import Trace, read_traces
from agentrl_tracer.schemas import POLICY_REWARD_KEY, REWARD_RANGE, Reward, Rollout, is_reward

_AT_ONCE = 16
"""Calls of functions that run at a time."""
_GROUPS_AT_ONCE = 32
"""Groups whose traces are in memory."""
_RAISED = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""What a function may raise; CancelledError if what it awaits was canceled."""
OnProgress = Callable[[int, int], object]
"""Called with the numbers of scored and of all groups."""


class Scorer:
    """Scores groups of rollouts in the background, each once.

    Args:
        again: score rollouts that have their rewards, too, and replace these.
        alone: set other rewards of the rollouts aside.
        wait: waits for a future, and does what must be done meanwhile.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], context: ScoringContext, *,
        again: bool = False, alone: bool = False,
        wait: Callable[[Future[None]], object] = Future[None].result,
    ) -> None:  # fmt: skip
        self._functions = functions
        self._context, self._again, self._alone, self._wait = context, again, alone, wait
        self._under_way: dict[str, Future[None]] = {}
        self._failures: dict[tuple[str, str], list[str]] = {}  # by function and kind; not told yet
        self._jobs = ThreadPoolExecutor(thread_name_prefix="rewards")
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._groups = asyncio.Semaphore(_GROUPS_AT_ONCE)
        self._awaited = asyncio.Event()  # while the trainer waits
        for function in functions:
            if connect := getattr(function.call, "connect", None):
                connect(context)

    # ---- the trainer's thread

    def begin(self, group: Sequence[str]) -> None:
        """Begin to score the rollouts of a finished group, unless that was begun before."""
        if not self._functions or not group or group[0] in self._under_way:
            return
        score = self._score(list(group))
        self._under_way[group[0]] = asyncio.run_coroutine_threadsafe(score, _event_loop())

    def finish(self, groups: Iterable[Sequence[str]], on_progress: OnProgress) -> None:
        """Return when the rewards of these groups are stored; note what went wrong."""
        found = [group for group in groups if group] if self._functions else []
        for group in found:
            self.begin(group)
        if not found:
            return
        soon = _event_loop().call_soon_threadsafe
        soon(self._awaited.set)
        try:
            for at, group in enumerate(found):
                on_progress(at, len(found))
                self._wait(self._under_way[group[0]])
                del self._under_way[group[0]]
        finally:
            soon(self._awaited.clear)
        self._tell()

    def score(self, rollouts: Sequence[Rollout], on_progress: OnProgress) -> None:
        """Score rollouts, group by group."""
        groups: dict[str, list[str]] = {}
        for one in rollouts:
            groups.setdefault(one.group_id, []).append(one.id)
        self.finish(groups.values(), on_progress)

    def take_metrics(self) -> dict[str, float]:
        """Return what the functions have counted since the last time."""
        takers = (getattr(one.call, "take_metrics", None) for one in self._functions)
        return dict(chain.from_iterable(take().items() for take in takers if take))

    def close(self) -> None:
        """Give up what is under way; what is being stored is stored."""
        self._tell()
        for scoring in self._under_way.values():
            scoring.cancel()
        self._jobs.shutdown(cancel_futures=True)

    def _tell(self) -> None:
        """Note each kind of failure once, with how often it has occurred."""
        failures, self._failures = self._failures, {}
        for kind, said in list(failures.items()):  # the other thread may yet add one
            text = f"rewards: {kind[0]} gave {len(said)} rollouts no reward: {said[0]}"
            self._context.note_once(" ".join(kind), text)

    # ---- the event loop

    async def _score(self, group: Sequence[str]) -> None:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._jobs)
        async with self._groups:
            traces = await in_thread(self._read, group)
            asked = [
                self._ask(function, given)
                for function in self._functions
                for given in ([traces] if function.compares_group else [[one] for one in traces])
            ]
            scores = [*chain.from_iterable(await asyncio.gather(*asked))]
            attempts = [trace.attempt_id for trace in traces]
            names = [function.name for function in self._functions]
            keep = partial(self._context.store.set_scores, alone=self._alone)
            await in_thread(keep, attempts, names, scores)

    def _read(self, group: Sequence[str]) -> list[Trace]:
        """Read the traces, without those whose attempt failed and was rewarded by a policy."""
        store = self._context.store
        traces = read_traces(store, store.rollouts(self._context.run_id, ids=group))
        return [one for one in traces if all(r.key != POLICY_REWARD_KEY for r in one.rewards)]

    async def _ask(self, function: RewardFunction, traces: Sequence[Trace]) -> list[Reward]:
        """Return what a function gives a group's traces, or a single one; or gave them before."""
        earlier = [_earlier(function, trace) for trace in traces]
        if all(earlier) and not self._again:
            return [*chain.from_iterable(earlier)]
        given = list(traces) if function.compares_group else traces[0]
        if function.takes_cores:
            await self._awaited.wait()
        try:
            async with self._calls:
                result, error = await asyncio.wrap_future(_on_thread(function.call, given))
                if error is not None:
                    raise error
                result = await result if inspect.isawaitable(result) else result
            results = list(result) if function.compares_group else [result]
            if len(results) != len(traces):
                raise ValueError(f"{len(results)} results for {len(traces)} rollouts")
        except _RAISED as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run ends; else something that the function awaited was canceled
            results = [error] * len(traces)
        cases = zip(traces, results, earlier, strict=True)
        return [one for case in cases for one in self._rewards(function, *case)]

    # ---- results

    def _rewards(
        self, function: RewardFunction, trace: Trace, result: Any, earlier: list[Reward]
    ) -> list[Reward]:
        """Return a result as rewards: of a mapping each by its key. Where there is none, or the
        function failed, the earlier ones stay."""
        if result is None:
            return earlier
        try:
            if isinstance(result, BaseException):
                raise result
            named = result if isinstance(result, Mapping) else {function.name: result}
            return [_reward(function, trace, str(k), _number(x)) for k, x in named.items()]
        except _RAISED as error:  # also of any object's own ``__float__``
            refused = self._refused(function, trace, error)
            return earlier or [refused]

    def _refused(self, function: RewardFunction, trace: Trace, error: BaseException) -> Reward:
        """Count a failure. Its reward is infinite, so that the rollout's others do not train it."""
        lines = str(error).strip().splitlines() or [""]
        said = f"{type(error).__name__}: {lines[0][:300]}"
        self._failures.setdefault((function.name, type(error).__name__), []).append(said)
        return _reward(function, trace, function.name, math.inf, said)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the process's loop for rewards: connections of a module's client belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_event_loop.cache_clear)  # a child has not the thread


def _number(value: Any) -> float:
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if not is_reward(number):
        raise ValueError(f"it returned {value!r}, and {REWARD_RANGE}")
    return number


def _reward(
    function: RewardFunction, trace: Trace, name: str, value: float, why: str | None = None
) -> Reward:
    key = f"{function.keys}{name}"
    return Reward(trace.attempt_id, trace.rollout_id, name, value, key, explanation=why)


def _on_thread(call: Callable[[Any], Any], given: Any) -> Future[tuple[Any, BaseException | None]]:
    """Call a function on a thread of its own, which keeps no process alive where it hangs."""
    future = Future[tuple[Any, BaseException | None]]()
    future.set_running_or_notify_cancel()  # from now on only who waits for it can be canceled

    def run() -> None:
        try:
            future.set_result((call(given), None))
        except BaseException as error:
            future.set_result((None, error))

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return future


def _earlier(function: RewardFunction, trace: Trace) -> list[Reward]:
    """Return the rewards that a function gave before; none if it had failed."""
    found = [one for one in trace.rewards if one.key.startswith(function.keys)]
    return found if all(is_reward(one.value) for one in found) else []
