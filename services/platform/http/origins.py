"""CORS: only pages of the listed origins may call the JSON port. By default none are listed.

A browser sends a preflight before a JSON request, because forms cannot send JSON. Preflights of other origins are
refused. Cookies are never allowed.
"""

import re
from collections.abc import Collection
from typing import Any

_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_REQUEST_HEADERS = (
    "authorization, content-type, connect-protocol-version, connect-timeout-ms, freshet-priority, x-request-id"
)
_ANSWER_HEADERS = "retry-after-ms, x-request-id"
# Chromium's longest preflight cache time.
_PREFLIGHT_S = 7200


def origins(value: str) -> frozenset[str]:
    """Return a setting's origins. Raises: ValueError."""
    found = frozenset(part.strip().lower() for part in value.split(",") if part.strip())
    for one in sorted(found):
        if not _ORIGIN.fullmatch(one):
            raise ValueError(f"origin {one!r} allowed: scheme://host[:port] of http or https, no path, no *")
    return found


class WithOrigins:
    """An ASGI application that answers preflights and lets the allowed origins read answers."""

    def __init__(self, application: Any, allowed: Collection[str]) -> None:
        self._application, self._allowed = application, allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        may_read = origin in self._allowed
        if scope["method"] == "OPTIONS" and origin and b"access-control-request-method" in headers:
            await (self._allow if may_read else self._refuse)(origin, send)
            return

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(b"access-control-expose-headers", _ANSWER_HEADERS.encode())] if may_read else []
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *_cors_headers(origin, may_read), *added],
                }
            await send(message)

        await self._application(scope, receive, told)

    async def _allow(self, origin: str, send: Any) -> None:
        headers = [
            *_cors_headers(origin, True),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", _REQUEST_HEADERS.encode()),
            (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _refuse(self, origin: str, send: Any) -> None:
        headers = [*_cors_headers(origin, False), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        text = f"origin={origin[:200]!r} allowed: those of FRESHET_GATEWAY_ORIGINS\n"
        await send({"type": "http.response.body", "body": text.encode()})


def _cors_headers(origin: str, may_read: bool) -> list[tuple[bytes, bytes]]:
    """`vary` tells caches that the answer depends on the origin."""
    return [(b"vary", b"origin"), *([(b"access-control-allow-origin", origin.encode("latin-1"))] if may_read else [])]
