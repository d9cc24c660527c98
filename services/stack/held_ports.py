"""Reserve ports until a server listens."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def held_for_servers(host: str, ports: Iterable[int]) -> Iterator[None]:
    """Keep the system from giving these free ports to outgoing connections.

    Servers can bind them with SO_REUSEADDR or SO_REUSEPORT, as gRPC, Kafka, Redis and Triton do.
    """
    with ExitStack() as sockets:
        for port in ports:
            holder = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with suppress(OSError):
                holder.bind((host, port))
        yield
