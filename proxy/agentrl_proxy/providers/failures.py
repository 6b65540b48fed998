"""Turn the exceptions of a provider's call into API errors.

Knows LiteLLM's, openai's and Python's exceptions. Does not know requests or rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from agentrl_proxy.errors import ApiError, invalid

log = logging.getLogger("agentrl.proxy")

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def api_error(
    error: Exception, model: str, *, sent: bool, clean: Callable[[str], str]
) -> tuple[ApiError, int | None]:
    """Return the client's error, and the status that the provider is recorded with.

    Args:
        sent: whether the provider was sent a request. If it was not, LiteLLM refused the client's
            request (400), and the status is None.
        clean: removes secrets from a text.
    """
    if isinstance(error, ApiError):
        return error, None
    import openai  # LiteLLM's errors derive from it, so it is imported by now

    said = f"{type(error).__name__}: {clean(getattr(error, 'message', None) or str(error))}"
    status = getattr(error, "status_code", None)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    # Its code met a value that it was not made for. It raises a bare ``Exception`` for messages
    # that it cannot read; errors of sockets are different.
    in_litellm = type(causes[-1]).__module__ == "builtins" and not isinstance(causes[-1], OSError)
    if isinstance(error, openai.APITimeoutError):
        status, code, what = 504, "provider_timeout", f"the model {model!r} did not answer in time"
    # LiteLLM's own APIConnectionError may be anything; these are about connections.
    elif any(type(c) is openai.APIConnectionError or isinstance(c, OSError) for c in causes):
        status, code = 502, "provider_unreachable"
        what = f"the provider of {model!r} cannot be reached"
    elif not sent and (in_litellm or (status == 400 and len(causes) == 1)):
        unsupported = type(error).__name__ == "UnsupportedParamsError"
        code = "unsupported_parameter" if unsupported else "invalid_value"
        message = f"LiteLLM made no request of this to the model {model!r}: {said}"
        return invalid(None, message, code=code), None
    elif type(status) is int and 400 <= status < 600 and len(causes) > 1 and not in_litellm:
        code = clean(next(filter(None, map(_provider_code, causes)), "provider_error"))
        what = f"the provider of {model!r} answered {status}"
    else:
        log.error("a call to the model %r failed: %s", model, said)
        status, code, what = 502, "provider_error", f"the call to the model {model!r} failed"
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    after = next(filter(None, map(_retry_after, causes)), None)
    headers = None if after is None else {"retry-after": clean(after)}
    return ApiError(status, f"{what}: {said}", kind=kind, code=code, headers=headers), status


def _provider_code(error: BaseException) -> str | None:
    """The provider's own code (``context_length_exceeded``, ...), if it gave one."""
    code, body = getattr(error, "code", None), getattr(error, "body", None)
    if isinstance(body, dict):
        inner = body.get("error")
        code = (inner if isinstance(inner, dict) else body).get("code", code)
    return code if isinstance(code, str) and code.isidentifier() else None


def _retry_after(error: BaseException) -> str | None:
    noted = getattr(error, "litellm_response_headers", None)
    for headers in (noted, getattr(getattr(error, "response", None), "headers", None)):
        value = (headers or {}).get("retry-after")
        if isinstance(value, str) and value.isascii() and value.isprintable():
            return value
    return None
