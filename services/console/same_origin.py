"""Middleware that checks each request's host and origin, and adds security headers to each response.

A browser sends the session cookie from any page, and a foreign host name may resolve to this machine. So each request
must name one of the console's hosts. A WebSocket, and a request other than GET and HEAD, must not come from a page of
another host.
"""

from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Vue compiles templates in the browser (`unsafe-eval`). Nothing is loaded from other hosts.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws: wss:; "
    "frame-ancestors 'none'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


class SameOrigin:
    """ASGI middleware. hosts: the console's host names; empty: those of the loopback interface."""

    def __init__(self, app: Any, hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(hosts or _LOOPBACK)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it with 403."""
        # Health checks name the address of a container.
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/healthz":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if _name(f"//{host}") not in self._hosts or (origin and not reads and urlsplit(origin).netloc != host):
            await _refuse(scope, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _refuse(scope: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"not a name of this console, or a request of another page\n"})
