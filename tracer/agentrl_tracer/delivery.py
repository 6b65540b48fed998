"""Notice in the agent's process that a model call raised, or was canceled, before its answer came.

The gateway sees only its end of the connection: an answer that lies in a buffer when its client
gives up counts there as delivered. A stream that the agent stops reading is no failure.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

from agentrl_tracer.context import RolloutContext, current_rollout
from agentrl_tracer.conventions import REQUEST_HEADER

GivenUp = Callable[[RolloutContext, str], None]
"""Takes the rollout and the id of a request whose answer did not come through."""
_Report = Callable[[], None]


def watch_send(
    given_up: GivenUp,
    module: ModuleType,
    headers: Mapping[str, str],
    send: Callable[[], Any],
) -> Any:
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
        return _watch_awaited(answer, module, report)
    _watch_body(answer, module, report)
    return answer


def report_of(given_up: GivenUp, headers: Mapping[str, str]) -> _Report | None:
    """Return what reports a request with these headers; None if it is not a rollout's."""
    request_id, rollout = headers.get(REQUEST_HEADER), current_rollout()
    if request_id is None or rollout is None:
        return None
    return partial(given_up, rollout, request_id)


async def _watch_awaited(sent: Awaitable[Any], module: ModuleType, report: _Report) -> Any:
    answer = await watch_read(sent, report)
    _watch_body(answer, module, report)
    return answer


async def watch_read(read: Awaitable[Any], report: _Report) -> Any:
    try:
        return await read
    except BaseException:  # canceled, or its event loop ended
        report()
        raise


def _watch_body(answer: Any, module: ModuleType, report: _Report) -> None:
    """Watch the body of an answer that is read later: a stream."""
    if not hasattr(module, "AsyncByteStream"):  # requests
        chunks = answer.iter_content
        answer.iter_content = lambda *args, **kwargs: _watch_chunks(  # pyright: ignore[reportUnknownLambdaType]
            chunks(*args, **kwargs), report
        )
    elif not answer.is_closed:
        sync, asynchronous = _stream_types(module)
        kind = sync if isinstance(answer.stream, module.SyncByteStream) else asynchronous
        answer.stream = kind(answer.stream, report)


def _watch_chunks(chunks: Iterable[bytes], report: _Report) -> Iterator[bytes]:
    try:
        yield from chunks
    except GeneratorExit:  # the agent has read enough
        raise
    except BaseException:
        report()
        raise


@cache
def _stream_types(module: Any) -> tuple[type[Any], type[Any]]:
    """Return watching streams, sync and async, of httpx or httpx2."""

    class Stream(module.SyncByteStream):
        def __init__(self, chunks: Any, report: _Report) -> None:
            self._chunks, self._report = chunks, report

        def __iter__(self) -> Iterator[bytes]:
            return _watch_chunks(self._chunks, self._report)

        def close(self) -> None:
            self._chunks.close()

    class AsyncStream(module.AsyncByteStream):
        def __init__(self, chunks: Any, report: _Report) -> None:
            self._chunks, self._report = chunks, report

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self._chunks:
                    yield chunk
            except GeneratorExit:
                raise
            except BaseException:
                self._report()
                raise

        async def aclose(self) -> None:
            await self._chunks.aclose()

    return Stream, AsyncStream
