"""Connections of the JSON port with limits on header size, time for header and body, and idle time.

uvicorn has such limits only with h11, which is half as fast as httptools. If an address has too many connections, its
oldest idle connection is closed. If the port has too many, the address with the most connections loses its oldest idle
one. If that address has no idle connection, the new connection is closed.
"""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS = 1024
# The other connections are for other addresses.
MAX_OF_ADDRESS = 768
MAX_HEADER_BYTES = 16 * 1024
HEADER_S, BODY_S, IDLE_S = 10.0, 30.0, 60


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with limits."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._began = self.loop.time()
        self._reads_header, self._header_bytes = False, 0
        self._close_in(HEADER_S)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_in(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        read_header = self._reads_header
        super().data_received(data)
        if self.transport.is_closing():
            return
        if read_header and self._reads_header:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response(f"header of more than {MAX_HEADER_BYTES} bytes")
        elif self._timer is None and self._is_idle:
            # No request has arrived, or only its first bytes.
            self._close_in(HEADER_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_header, self._header_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers after a chunked body are ignored.
        if self._reads_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reads_header = False
        self._close_in(BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._close_in(None)
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Do not log; the answer has the reason."""

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _make_room(self) -> None:
        all_of_them: list[Any] = [one for one in self.connections if not one.transport.is_closing()]
        hosts = Counter(one.client and one.client[0] for one in all_of_them)
        host = self.client and self.client[0]
        if hosts[host] <= MAX_OF_ADDRESS:
            if len(all_of_them) <= MAX_CONNECTIONS:
                return
            host = hosts.most_common(1)[0][0]
        idle = [
            one for one in all_of_them if one is not self and one._is_idle and (one.client and one.client[0]) == host
        ]
        min(idle, key=lambda one: one._began, default=self).transport.abort()
