"""Import and warm up, before the fork, what attempts will need.

Frameworks only: the user's own modules are imported in every attempt, which sees them fresh.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentrl.runner.agent_spec import AgentSpec

logger = logging.getLogger("agentrl.runner")

# lancedb starts threads of its own and breaks in a forked child; CrewAI's every flow imports it.
_NEVER = frozenset({"lancedb", "crewai.memory.storage.lancedb_storage"})
_THREADS_END_S = 1.0
_WARM_UP = "openai-warm-up"  # its name where modules to skip are listed


class StartedThreads(Exception):
    """Importing the named module started a thread, which no forked child would have."""


def third_party_modules(agent: AgentSpec, known: int) -> list[str]:
    """Return the installed ones of the modules that were imported after the first ``known``.

    They are in order of import; the user's and the standard library's are left out.
    """
    roots = installed_roots()
    own = Path(agent.target).stem if agent.kind == "file" else agent.target.partition(".")[0]
    found: list[str] = []
    # Walking over all would touch, and so copy, every module's memory page after a fork: 3 ms.
    new = itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - known))
    for name in reversed(list(new)):
        if name.partition(".")[0] == own or _within(name, _NEVER):
            continue
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if isinstance(file, str) and file.startswith(roots) and spec and spec.name == name:
            found.append(name)
    return found


def preload(names: Iterable[str], skip: Collection[str] = ()) -> int:
    """Import modules, and return how many are new; one that fails is left to the attempts.

    Args:
        skip: modules and packages to leave out.

    Raises:
        StartedThreads: a module started a thread; start the process over without it.
    """
    threads, before = {*threading.enumerate()}, len(sys.modules)
    for name in names:
        if name in sys.modules or _within(name, skip):
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            logger.debug("preloading %s failed: %s: %s", name, type(error).__name__, error)
        if not threads.issuperset(threading.enumerate()):
            raise StartedThreads(name)
    return len(sys.modules) - before


@cache  # computed before the fork, it costs the attempts nothing
def installed_roots() -> tuple[str, ...]:
    """Return the folders in which packages are installed."""
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        roots.add(site.getusersitepackages())
    both = roots | set(map(os.path.realpath, roots))
    return tuple(root.rstrip(os.sep) + os.sep for root in both)


def _within(name: str, modules: Collection[str]) -> bool:
    """Tell whether the module, or a package that it is in, is one of ``modules``.

    Not every module of its distribution: one of CrewAI's hundreds starts a thread, and leaving all
    of them to the attempts would cost each one seconds.
    """
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


# ---- warm-up

_SAID = {"role": "assistant", "content": "Yes."}
_COMPLETION = {
    "id": "chatcmpl-warm-up",
    "object": "chat.completion",
    "created": 0,
    "model": "warm-up",
    "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, "message": _SAID}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
}
_CHUNK = _COMPLETION | {
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "finish_reason": None, "delta": _SAID}],
}


def warm_up(skip: Collection[str] = ()) -> None:
    """Make calls with openai, if it is loaded, against a stand-in inside this process.

    A client's first call builds validators, compiles patterns and imports modules late, and the
    first call of a fresh process is often its only one: with openai warm, a rollout of
    examples/hello costs 52 instead of 78 CPU-ms. No connection, thread or descriptor remains. A
    call that fails is left to the attempts.

    Raises:
        StartedThreads: a thread is still running; start the process over without the warm-up.
    """
    if "openai" not in sys.modules or _WARM_UP in skip:
        return
    threads = {*threading.enumerate()}
    try:
        for _ in range(2):  # again: modules imported late empty Python's type caches
            _call_openai()
    except Exception as error:
        logger.info("warming up openai failed: %s: %s", type(error).__name__, error)
    deadline = time.monotonic() + _THREADS_END_S
    while not threads.issuperset(threading.enumerate()):
        if time.monotonic() > deadline:
            raise StartedThreads(_WARM_UP)
        time.sleep(0.01)


def _call_openai() -> None:
    import openai

    # The HTTP library of this version of openai.
    parent: Any = openai.DefaultHttpxClient.__base__
    http = importlib.import_module(parent.__module__.partition(".")[0])
    stream = f"data: {json.dumps(_CHUNK)}\n\ndata: [DONE]\n\n".encode()

    def answer(request: Any) -> Any:
        if json.loads(request.content).get("stream"):
            return http.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
        return http.Response(200, json=_COMPLETION)

    # The discard port; no client gets as far as to connect.
    key_and_url: Any = {"api_key": "warm-up", "base_url": "http://127.0.0.1:9"}
    openai.OpenAI(**key_and_url).close()  # with its usual transport
    http_client = openai.DefaultHttpxClient(transport=http.MockTransport(answer))
    with openai.OpenAI(**key_and_url, http_client=http_client) as client:
        create = partial(
            client.chat.completions.create,
            model="warm-up",
            messages=[{"role": "user", "content": "Are you there?"}],
            max_tokens=8,
        )
        create()
        for _ in create(stream=True):
            pass
