"""A TCP proxy on the loopback address, in a process of its own: who is behind it can be changed while clients stay.

It writes the port it listens on, then reads ports, one a line: each one ends the open connections, and new ones go to
it. It ends with its standard input.
"""

import asyncio
import sys

LOOPBACK = "127.0.0.1"


class Side(asyncio.Protocol):
    """One of the two ends of a connection: what comes in is written to the other."""

    def __init__(self, other: "Side | None" = None) -> None:
        self.other, self.early = other, bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Proxy:
    """The connections of now, and where new ones go."""

    def __init__(self) -> None:
        self.target = 0
        self.clients: set[Client] = set()

    def point(self, port: int) -> None:
        self.target = port
        for client in self.clients:
            client.transport.abort()
            if client.other is not None:
                client.other.transport.abort()

    async def connect(self, client: "Client") -> None:
        target = self.target
        try:
            _, server = await asyncio.get_running_loop().create_connection(lambda: Side(client), LOOPBACK, target)
        except OSError:
            client.transport.abort()
            return
        if client.transport.is_closing() or target != self.target:
            client.transport.abort()
            server.transport.abort()
            return
        client.other = server
        server.transport.write(bytes(client.early))


class Client(Side):
    """The end that somebody connected to."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self.proxy = proxy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.proxy.clients.add(self)
        self.connecting = asyncio.get_running_loop().create_task(self.proxy.connect(self))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.proxy.clients.discard(self)


async def main() -> None:
    loop, proxy = asyncio.get_running_loop(), Proxy()
    server = await loop.create_server(lambda: Client(proxy), LOOPBACK, 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        proxy.point(int(line))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
