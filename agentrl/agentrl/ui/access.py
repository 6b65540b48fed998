"""Let only requests with the token see the pages; the printed link carries it."""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
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

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                fixed = scope["path"].startswith(_OPEN)
                headers["cache-control"] = "max-age=3600" if fixed else "no-store"
            await send(message)

        await self._answer(scope)(scope, receive, sending)

    def _answer(self, scope: Scope) -> ASGIApp:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get(_PARAMETER)
        if given is not None and self._is_token(given):
            rest = urlencode([pair for pair in query if pair[0] != _PARAMETER])
            response = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(self._cookie, given, httponly=True, samesite="strict")
            return response
        if self._is_token(self._cookie_of(scope)) or scope["path"].startswith(_OPEN):
            if scope["method"] in ("GET", "HEAD") or _is_own(scope):
                return self._app
            return PlainTextResponse("Only the pages themselves may send forms.\n", 403)
        text = "Open the link that `agentrl ui` printed; with an operator key, add ?token=KEY.\n"
        return PlainTextResponse(text, 403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _cookie_of(self, scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"cookie":
                try:
                    cookies = SimpleCookie(value.decode("latin-1"))
                except CookieError:
                    continue
                if self._cookie in cookies:
                    return cookies[self._cookie].value
        return ""


def _is_own(scope: Scope) -> bool:
    """Whether a request comes from a page of this address: another port is another server."""
    headers = dict(scope["headers"])
    host, origin = headers.get(b"host", b""), headers.get(b"origin", b"")
    return not origin or origin.partition(b"://")[2] == host


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
