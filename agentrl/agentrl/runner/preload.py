"""Which modules are worth importing before the fork, and importing them.

Knows ``sys.modules`` and where packages are installed. Frameworks only: the user's own code is
imported in every attempt, so an attempt sees it fresh.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterable

from agentrl.runner.agent import AgentSpec

logger = logging.getLogger("agentrl.runner")

# lancedb starts threads of its own and breaks in a forked child; CrewAI's every flow imports it.
_NEVER = frozenset({"lancedb", "crewai.memory.storage.lancedb_storage"})


class StartedThreads(Exception):
    """Importing this module started a thread, which no forked child would have."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


def third_party_modules(agent: AgentSpec, known: Collection[str]) -> list[str]:
    """Loaded modules that are installed (not the user's, not the standard library) and not known.

    In order of import, so that importing them in this order repeats what happened.
    """
    roots = installed_roots()
    own = agent.target.partition(".")[0] if agent.kind == "module" else None
    found: list[str] = []
    # New ones are at the end. Walking over all would touch, and so copy, every module's memory page
    # after a fork: 3 ms.
    count = max(0, len(sys.modules) - len(known))
    for name in reversed(list(itertools.islice(reversed(sys.modules), count))):
        module = sys.modules.get(name)
        if name in known or module is None:
            continue
        top = name.partition(".")[0]
        if _within(name, _NEVER) or top == own or top == "__main__" or top.startswith("_agentrl_"):
            continue
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if not isinstance(file, str) or spec is None or spec.name != name:
            continue
        if file.startswith(roots) and not _beside(agent, file, roots):
            found.append(name)
    return found


def preload(names: Iterable[str], skip: Collection[str] = ()) -> int:
    """Imports modules that attempts will need; one that fails is left to them. Says how many.

    Raises:
        StartedThreads: a module started a thread; whoever asked should begin again without it.
    """
    threads = threading.active_count()
    before = len(sys.modules)
    for name in names:
        if name in sys.modules or _within(name, skip):
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            logger.debug("preloading %s failed: %s: %s", name, type(error).__name__, error)
        if threading.active_count() > threads:
            raise StartedThreads(name)
    return len(sys.modules) - before


@functools.cache  # asked before the fork, it costs the attempts nothing
def installed_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        roots.add(site.getusersitepackages())
    both = {*roots, *(os.path.realpath(root) for root in roots)}
    return tuple(sorted(root.rstrip(os.sep) + os.sep for root in both))


def _within(name: str, modules: Collection[str]) -> bool:
    """The module, or a package that it is in, is one of ``modules``.

    Not every module of its distribution: one of CrewAI's hundreds starts a thread, and leaving all
    of them to the attempts would cost each one seconds.
    """
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in modules for i in range(len(parts)))


def _beside(agent: AgentSpec, file: str, roots: tuple[str, ...]) -> bool:
    """The user's file lies in site-packages itself: its neighbours there are the user's."""
    if agent.kind != "file":
        return False
    folder = str(agent.folder) + os.sep
    return folder.startswith(roots) and folder not in roots and file.startswith(folder)
