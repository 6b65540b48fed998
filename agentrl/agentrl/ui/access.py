"""Let only requests with the token see the pages; the printed link carries it."""

from __future__ import annotations

import hmac
import secrets
from urllib.parse import quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.history.sources import cache_folder
from agentrl.process_privacy import open_private

HEADERS = {
    # No inline script or style, nothing from elsewhere: what an agent says cannot act on the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with none, browsers hide the Origin of our own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_PARAMETER = "token"
_OPEN = ("/static/",)  # the same for everyone


class TokenGate:
    """An ASGI app that answers 403 without the token, else is ``app``.

    ``?token=`` becomes an HttpOnly cookie, so that it stays out of later links. The cookie's name
    has the port: browsers share cookies between the ports of a host.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"agentrl-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        is_open = scope["path"].startswith(_OPEN)  # Host has a part in the URL's

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers["cache-control"] = "max-age=3600" if is_open else "no-store"
            await send(message)

        await self._answer(request, is_open)(scope, receive, sending)

    def _answer(self, request: Request, is_open: bool) -> ASGIApp:
        if self._is_token(given := request.query_params.get(_PARAMETER, "")):
            rest = request.url.remove_query_params(_PARAMETER)
            response = RedirectResponse(rest.replace(scheme="", netloc=""), 303)
            response.set_cookie(self._cookie, quote(given), httponly=True, samesite="strict")
            return response
        if not is_open and not self._is_token(unquote(request.cookies.get(self._cookie, ""))):
            text = (
                "Open the link that `agentrl ui` printed; with an operator key, add ?token=KEY, "
                "with special characters percent-encoded (+ is %2B)."
            )
            return PlainTextResponse(f"{text}\n", 403)
        if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
            return PlainTextResponse("No link of these pages has a NUL character.\n", 404)
        # Another port is another server.
        origin = request.headers.get("origin", "").partition("://")[2]
        is_own = "origin" not in request.headers or origin == request.headers.get("host")
        if request.method in ("GET", "HEAD") or is_own:
            return self._app
        return PlainTextResponse("Only the pages themselves may send forms.\n", 403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def kept_token(shown: str) -> str:
    """Return the token of a folder's or store's pages, made once: links survive a restart.

    It is below the home folder, which a sandboxed agent does not see.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = cache_folder(shown) / "token"
    if path.is_file() and (known := path.read_text().strip()):
        return known
    token = secrets.token_urlsafe(18)
    with open_private(path) as file:
        file.write(token.encode())
    return token
