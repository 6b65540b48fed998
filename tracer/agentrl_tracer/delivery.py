"""Notice in the agent's process that a model call raised, or was canceled, before its answer came.

The gateway sees only its end of the connection: an answer that lies in a buffer when its client
gives up counts there as delivered. A stream that the agent stops reading is no failure.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from agentrl_tracer.context import RolloutContext, current_rollout
from agentrl_tracer.conventions import REQUEST_HEADER

GivenUp = Callable[[RolloutContext, str], None]
"""Takes the rollout and the id of a request whose answer did not come through."""
_Report = Callable[[], None]


def watch_send(given_up: GivenUp, headers: Mapping[str, str], send: Callable[[], Any]) -> Any:
    """Send a marked request with httpx, httpx2 or requests; return what ``send`` does."""
    report = report_of(given_up, headers)
    if report is None:
        return send()
    try:
        answer = send()
    except BaseException:
        report()
        raise
    if inspect.isawaitable(answer):
        return _watch_awaited(answer, report)
    _watch_body(answer, report)
    return answer


def report_of(given_up: GivenUp, headers: Mapping[str, str]) -> _Report | None:
    """Return what reports a request with these headers; None if it is not a rollout's."""
    request_id, rollout = headers.get(REQUEST_HEADER), current_rollout()
    if request_id is None or rollout is None:
        return None
    return partial(given_up, rollout, request_id)


async def _watch_awaited(sent: Awaitable[Any], report: _Report) -> Any:
    answer = await watch_read(sent, report)
    _watch_body(answer, report)
    return answer


async def watch_read(read: Awaitable[Any], report: _Report) -> Any:
    try:
        return await read
    except BaseException:  # canceled, or its event loop ended
        report()
        raise


def _watch_body(answer: Any, report: _Report) -> None:
    """Watch the body of an answer that is read later: a stream."""
    if hasattr(answer, "iter_content"):  # requests
        answer.iter_content = partial(_watch_chunks, answer.iter_content, report)
    elif not answer.is_closed:
        answer.iter_raw = partial(_watch_chunks, answer.iter_raw, report)
        answer.aiter_raw = partial(_watch_async_chunks, answer.aiter_raw, report)


def _watch_chunks(
    read: Callable[..., Iterable[bytes]], report: _Report, *args: Any, **kwargs: Any
) -> Iterator[bytes]:
    try:
        yield from read(*args, **kwargs)
    except GeneratorExit:  # the agent has read enough
        raise
    except BaseException:
        report()
        raise


async def _watch_async_chunks(
    read: Callable[..., AsyncGenerator[bytes]], report: _Report, *args: Any, **kwargs: Any
) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(read(*args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk
    except GeneratorExit:
        raise
    except BaseException:
        report()
        raise
