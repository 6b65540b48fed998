"""Read the bodies of requests: within limits, and of the shape that the SDK sends."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl_proxy.dependencies import ConnectionLimits, GatewayStats
from agentrl_proxy.server.large_requests import LargeRequests
from agentrl_proxy.server.request_body import BodyReader

# The SDK splits training data into requests of a few MiB.
_LIMITS = ConnectionLimits(receive_s=300.0, receive_bytes=2**30, stall_s=60.0, grace_s=5)
BODIES = BodyReader(256 * 2**20, _LIMITS, GatewayStats(), LargeRequests())

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a session's id is part of its models' folders
_MOST_SAMPLES = 1024
_REQUIRED = {"SampleRequest": ["sampling_session_id"], "SaveWeightsRequest": ["path"]}
"""Fields that the SDK's types leave optional for other servers."""


def read_json(kind: type[BaseModel], body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, as it was sent.

    Raises:
        ValueError: it is not what the SDK sends as ``kind``; names the field.
    """
    try:
        _lenient(kind).model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ValueError(f"{where}: {first['msg']}") from None
    read: dict[str, Any] = json.loads(body)
    needed = _REQUIRED.get(kind.__name__, [])
    if kind.__name__ == "LoadWeightsRequest" and not read.get("model_id"):
        needed = ["session_id", "model_seq_id"]  # it makes a model
    if missing := [name for name in needed if read.get(name) is None]:
        raise ValueError(f"{missing[0]}: is missing")
    if read.get("model_id") == "":
        raise ValueError("model_id: is empty")
    session = read.get("session_id")
    if session is not None and not _SESSION.fullmatch(session):
        raise ValueError("session_id: must be letters, digits, - and _")
    if read.get("num_samples", 1) > _MOST_SAMPLES:
        raise ValueError(f"num_samples: must be at most {_MOST_SAMPLES}")
    return read


@cache
def _lenient(kind: type[BaseModel]) -> type[BaseModel]:
    """Return the SDK's type, strict about types, that ignores fields of newer versions."""
    config = ConfigDict(extra="ignore", strict=True)
    return type(kind.__name__, (kind,), {"model_config": config, "__module__": __name__})
