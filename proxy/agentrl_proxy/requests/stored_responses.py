"""Find the responses that a client refers to by id, and put them in the place of their ids.

A request of the Responses API may name an earlier response (``previous_response_id``) or an item of
one (``item_reference``). Both are read from the store, so they outlive the gateway. A caller knows
the responses of its own attempt; outside rollouts, those that the same key got. All others, and
those with ``store: false``, do not exist for it. Does not know prompts or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.protocols.chat_objects import Heading
from agentrl_proxy.protocols.responses import ResponsesDialect
from agentrl_proxy.requests.auth import ask, caller_digest
from agentrl_proxy.requests.recording import CALLER, RESPONSE_PREFIX
from agentrl_tracer.schemas import AttemptRef, Call, CallState

if TYPE_CHECKING:
    from agentrl_tracer.store import Store

Item = dict[str, Any]

_RESPONSE_ID = re.compile(RESPONSE_PREFIX + "[0-9a-f]{24}")
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})(?:_\d+)?")
_STATUS = {
    CallState.OPEN: "in_progress",
    CallState.ERROR: "failed",
    CallState.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of one caller."""

    store: Store
    attempt: AttemptRef | None
    headers: Mapping[str, str]

    async def find(self, response_id: object) -> Call | None:
        if not isinstance(response_id, str) or not _RESPONSE_ID.fullmatch(response_id):
            return None
        call = await ask(self.store, self.store.call, response_id)
        if call is None or (call.request or {}).get("store") is False:
            return None
        if self.attempt is None:
            own = call.attempt_id is None
            own = own and call.params.get(CALLER) == caller_digest(self.headers)
        else:
            own = call.attempt_id == self.attempt.attempt_id
        return call if own else None

    async def get(self, response_id: str) -> Call:
        """Raise an ApiError (404) if the caller has no such response."""
        call = await self.find(response_id)
        if call is None:
            message = f"Response with id {response_id[:100]!r} not found."
            raise ApiError(404, message, param="response_id", code="not_found")
        return call

    async def resolved(self, raw: dict[str, Any]) -> tuple[dict[str, Any], Call | None]:
        """Return a request with all items in its ``input``, and the last call that it named.

        Raises:
            ApiError: a response or item is not found, or was not completed (400).
        """
        items, previous = _as_items(raw.get("input")), raw.get("previous_response_id")
        if previous is None and not any(map(_is_reference, items)):
            return raw, None
        earlier, said, known = None, list[Any](), dict[str, tuple[Call, dict[str, Item]]]()
        if previous is not None:
            earlier = await self.find(previous)
            if earlier is None:
                message = f"Previous response with id {previous!r} not found."
                code = "previous_response_not_found"
                raise invalid("previous_response_id", message, code=code)
            asked = _completed(earlier, "previous_response_id").request or {}
            said += [*_as_items(asked.get("input")), *_output_items(earlier)]
        for i, item in enumerate(items):
            if not _is_reference(item):
                said.append(item)
                continue
            where = f"input[{i}].id"
            found = _ITEM_ID.fullmatch(str(item.get("id")))
            of = RESPONSE_PREFIX + found[1] if found else ""
            if of not in known and (call := await self.find(of)):  # read once for all its items
                known[of] = call, {one["id"]: one for one in _output_items(_completed(call, where))}
            if of not in known or item["id"] not in known[of][1]:
                message = f"Item with id {str(item.get('id'))[:100]!r} not found."
                raise invalid(where, message, code="item_not_found")
            earlier, items_of = known[of]
            # Text before and after a tool call is streamed as two messages with one id.
            if (found_item := items_of[item["id"]]) not in said:
                said.append(found_item)
        return {**raw, "input": said or raw.get("input")}, earlier


def response_of(call: Call) -> dict[str, Any]:
    """Return a stored response as it was, or as far as it got."""
    dialect = ResponsesDialect(call.request or {})
    if call.state is CallState.COMPLETED and call.response is not None:
        return dialect.whole(call.response)
    heading = Heading(call.response_id, call.model, created=int(call.started_at))
    return dialect.unanswered(heading, _STATUS.get(call.state, "failed"), call.error)


def _as_items(given: Any) -> list[Any]:
    """Return the ``input`` of a request as a list of items."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _output_items(call: Call) -> list[Item]:
    items: list[Item] = response_of(call)["output"]
    for item in items:
        for part in item.get("content") or ():
            part.pop("logprobs", None)
    return items


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _completed(call: Call, where: str) -> Call:
    if call.state is not CallState.COMPLETED:
        how = _STATUS.get(call.state, "failed").replace("_", " ")
        message = f"{where}: the response {call.response_id!r} is {how}; it cannot be continued"
        raise invalid(where, message, code="response_not_completed")
    return call
