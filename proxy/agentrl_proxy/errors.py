"""Define the gateway's errors, in the format that OpenAI's clients understand.

Messages are for the person who debugs an agent: they name what was sent and what is allowed, and
never quote a credential.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl_tracer.schemas import AttemptState

# OpenAI's clients retry 408, 409, 429 and 5xx unless this header stops them.
DO_NOT_RETRY = {"x-should-retry": "false"}
_LONGEST_MESSAGE = 1000

Names = Sequence[tuple[str, str]]
"""How a protocol names the fields of chat completions: patterns and replacements, in order."""


class ApiError(Exception):
    """A refusal or failure, as an HTTP answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # It may quote the request, which may be long or contain lone surrogates.
        message = message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers
        self.kind, self.param, self.code = kind, param, code

    @property
    def may_pass(self) -> bool:
        """Whether the client may retry, because the same request may succeed later."""
        return (self.status in (408, 429) or self.status >= 500) and self.headers != DO_NOT_RETRY

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def rename(self, names: Names) -> None:
        """Name the wrong field as the client's protocol does."""
        for pattern, own in names:
            self.message = re.sub(pattern, own, self.message, count=1)
            self.param = self.param and re.sub(pattern, own, self.param, count=1)


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def attempt_sealed(state: AttemptState | None) -> ApiError:
    """``state``: the attempt's state in the store; None: it was deleted."""
    message = f"this attempt is over (state: {state or 'deleted'}): no more calls, spans or rewards"
    kind, code = "conflict_error", "attempt_sealed"
    return ApiError(409, message, kind=kind, code=code, headers=DO_NOT_RETRY)


def model_not_found(model: str) -> ApiError:
    message = f"the model {model[:200]!r} does not exist"
    return ApiError(404, message, param="model", code="model_not_found")


def context_length_exceeded(
    prompt_tokens: int, context_length: int, param: str, *, at_least: bool = False
) -> ApiError:
    """``at_least``: the prompt's tokens were not all counted.

    Clients of Anthropic's know this error by its words: Claude Code then compacts its conversation.
    """
    return invalid(
        param,
        f"the prompt is too long: {'at least ' * at_least}{prompt_tokens} tokens > "
        f"{context_length - 1} maximum; this model's context is {context_length} tokens, and at "
        "least one must be left for the answer",
        code="context_length_exceeded",
    )


def unavailable(message: str, code: str) -> ApiError:
    # A supervised sampler takes about this long to restart.
    return ApiError(503, message, kind="server_error", code=code, headers={"retry-after": "2"})


def refused_by_sampler(code: str, message: str) -> ApiError:
    """Return the answer for a RefusedError's ``code``."""
    match code:
        case "invalid_parameter":
            return invalid(None, message, code=code)
        case "unknown_adapter":
            return ApiError(404, message, param="model", code="model_not_found")
        case "deferred":
            return unavailable(message, "adapter_deferred")
        case "files_not_found":
            return unavailable(message, "adapter_files_not_found")
        case _:
            return unavailable(message, "sampler_unavailable")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=headers)


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def internal_error() -> ApiError:
    message = "internal error of the gateway; see its log"
    return ApiError(500, message, kind="server_error", code="internal_error")
