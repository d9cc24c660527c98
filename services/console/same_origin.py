"""Middleware that checks each request's host and origin, and adds security headers to each response.

A foreign page can use the session cookie, and a foreign name can resolve to this machine. So each request must name one
of the console's hosts; a WebSocket or a write must also come from a page of the same host.
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
    """ASGI middleware. hosts: the console's host names; empty means the loopback interface's names."""

    def __init__(self, app: Any, hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(hosts or _LOOPBACK)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it with 403."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        # Health checks name the address of a container, which is none of the host names.
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/healthz":
            await self._app(scope, receive, send)
        elif self._is_own(scope):
            await self._app(scope, receive, with_headers)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            text = b"not a name of this console, or a request of another page\n"
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": text})

    def _is_own(self, scope: Any) -> bool:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        try:
            return urlsplit(f"//{host}").hostname in self._hosts and (
                not origin or reads or urlsplit(origin).netloc == host
            )
        except ValueError:
            return False
