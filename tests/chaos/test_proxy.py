"""The proxy before Redis: clients stay, who is behind it changes."""

import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Named(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(self.server.name + b" " + line)


@contextmanager
def a_server(name: bytes) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Named) as server:
        server.name, server.daemon_threads = name, True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def point(proxy: subprocess.Popen[str], server: int) -> None:
    proxy.stdin.write(f"{server}\n")
    proxy.stdin.flush()
    assert proxy.stdout.readline() == "done\n"


def ask(connection: socket.socket) -> bytes:
    """What comes back; nothing from a connection that has ended."""
    try:
        connection.sendall(b"hello\n")
        return connection.recv(100)
    except ConnectionError:
        return b""


def test_open_connections_end_and_new_ones_reach_the_new_server() -> None:
    command = [sys.executable, str(Path(__file__).with_name("proxy.py"))]
    with a_server(b"old") as old, a_server(b"new") as new:
        proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            port = int(proxy.stdout.readline())
            point(proxy, old)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as before:
                assert ask(before) == b"old hello\n"
                point(proxy, new)
                assert ask(before) == b""
            with socket.create_connection(("127.0.0.1", port), timeout=10) as after:
                assert ask(after) == b"new hello\n"
        finally:
            proxy.communicate(timeout=10)
        assert proxy.returncode == 0
