"""Check the keys of requests: whose rollout they belong to, and what they may do.

Keys are kept only as hashes and never appear in a log line or an error. Does not know models.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from agentrl_proxy.dependencies import GatewayStats
from agentrl_proxy.errors import ApiError, attempt_sealed, forbidden, unauthorized
from agentrl_proxy.requests.lookups import Lookup
from agentrl_tracer.conventions import ROLLOUT_HEADER as CONTEXT_HEADER
from agentrl_tracer.schemas import AttemptRef, AttemptState

if TYPE_CHECKING:
    from agentrl_tracer.store import Store

log = logging.getLogger("agentrl.proxy")

T = TypeVar("T")
_MAX_CACHED = 10_000
_MOST_LOGGED = 256  # requests that name two rollouts; ``stats`` counts all


async def ask(store: Store, method: Callable[..., T], *args: object) -> T:
    """Call a store method: directly on SQLite (0.1 ms), in a thread over a network."""
    if store.is_remote:
        return await asyncio.to_thread(method, *args)
    return method(*args)


class Credentials:
    """Turns the credentials of a request into its caller's attempt.

    While its attempt runs, an attempt's key opens models, spans and rewards of its own rollout. The
    operator's key opens everything that needs no rollout. The context header identifies before path
    and key, which must not name another rollout.
    """

    def __init__(self, store: Store, operator_key: str | None, stats: GatewayStats) -> None:
        remote = store.is_remote
        self._states = Lookup(
            together=remote, one=store.attempt_state, several=store.attempt_states
        )
        self._attempts = Lookup(
            together=remote, one=store.authenticate, several=store.authenticate_all
        )
        self._operator = None if operator_key is None else _digest(operator_key)
        self._stats = stats
        self._known: dict[bytes, AttemptRef] = {}

    async def caller(
        self, headers: Mapping[str, str], rollout_id: str | None, *, may_be_sealed: bool = False
    ) -> AttemptRef | None:
        """Return the attempt that sent these headers to this path.

        None: the operator did, or an unattributed client on this machine.

        Args:
            may_be_sealed: the writer of spans and rewards checks the attempt itself.

        Raises:
            ApiError: 401 without a valid key, 403 when header, path and key disagree, 409
                when the attempt is sealed.
        """
        try:
            attempt = await self._caller(headers, rollout_id)
            if attempt is not None and not may_be_sealed:
                state = await self._states.of(attempt.attempt_id)
                if state is not AttemptState.RUNNING:
                    raise attempt_sealed(state)
            return attempt
        except ApiError as error:
            if error.status in (401, 403):
                self._stats.refused += 1
            elif error.code == "attempt_sealed":
                self._stats.sealed += 1
            raise

    async def operator_only(self, headers: Mapping[str, str]) -> None:
        key = _key_in(headers)
        if self._is_operator(key):
            return
        self._stats.refused += 1
        if self._operator is None:
            raise forbidden("this gateway has no operator key", "operator_only")
        if key is None:
            raise unauthorized("send the operator key as `Authorization: Bearer <key>`")
        raise forbidden("only the operator key opens this", "operator_only")

    def may_read_stats(self, headers: Mapping[str, str]) -> bool:
        """Return whether the caller may read counters: the operator, or anyone without one."""
        return self._operator is None or self._is_operator(_key_in(headers))

    async def _caller(
        self, headers: Mapping[str, str], rollout_id: str | None
    ) -> AttemptRef | None:
        named, key = headers.get(CONTEXT_HEADER), _key_in(headers)
        if named is None and self._is_operator(key):
            if rollout_id is not None:
                # Only an attempt's own key tells which attempt of the rollout it is.
                raise self._mismatch(rollout_id, "the operator key belongs to no rollout")
            return None
        attempt = await self._attempt(key if named is None else named.strip())
        if attempt is None:
            if named is not None:
                raise unauthorized(f"the key in {CONTEXT_HEADER} is not known here")
            if key is None and (rollout_id is not None or self._operator is not None):
                raise unauthorized("send a key as `Authorization: Bearer <key>` or `x-api-key`")
            if rollout_id is not None or self._operator is not None or _is_ours(key):
                raise unauthorized("this key is not known here")
            return None
        origin = "the key" if named is None else CONTEXT_HEADER
        if rollout_id is not None and rollout_id != attempt.rollout_id:
            raise self._mismatch(rollout_id, f"{origin} belongs to another rollout")
        if named is not None and _is_ours(key):
            other = await self._attempt(key)
            if other is None or other.attempt_id != attempt.attempt_id:
                why = f"the key belongs to another rollout than {CONTEXT_HEADER}"
                raise self._mismatch(attempt.rollout_id, why)
        return attempt

    async def _attempt(self, key: str | None) -> AttemptRef | None:
        if key is None:
            return None
        digest = _digest(key)
        attempt = self._known.get(digest)
        if attempt is None:
            attempt = await self._attempts.of(key)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            if attempt is not None:
                self._known[digest] = attempt
        return attempt

    def _is_operator(self, key: str | None) -> bool:
        """Whether this is the operator's key. Without one there is no operator."""
        if self._operator is None or key is None:
            return False
        return hmac.compare_digest(_digest(key), self._operator)

    def _mismatch(self, rollout_id: str, why: str) -> ApiError:
        self._stats.mismatched += 1
        if self._stats.mismatched <= _MOST_LOGGED:  # an agent could fill the disk
            log.warning("refused a request to rollout %.64r: %s", rollout_id, why)
        return forbidden(f"the request names two rollouts: {why}", "rollout_mismatch")


def caller_digest(headers: Mapping[str, str]) -> str | None:
    """Return what tells the keys of clients outside rollouts apart; None: no key was sent."""
    key = _key_in(headers)
    return None if key is None else _digest(key).hex()


def _key_in(headers: Mapping[str, str]) -> str | None:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key") or None


def _is_ours(key: str | None) -> bool:
    """Attempt keys of other stores or deleted runs must not pass as keys of other services."""
    return key is not None and key.startswith("sk-agentrl-")


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
