"""Ports are held for servers, and whoever has a taken one is named."""

import os
import socket

import pytest

from services.platform.machine import PortTaken, check_port_free
from services.stack.held_ports import held_for_servers


def test_a_held_port_is_for_servers_and_for_no_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with held_for_servers("127.0.0.1", [port]):
        check_port_free("127.0.0.1", port)
        with socket.socket() as outgoing, pytest.raises(OSError, match="in use"):
            outgoing.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port), timeout=2):
            pass


def test_a_taken_port_is_left_to_its_owner_and_the_others_are_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port, port = free.getsockname()[1], taken.getsockname()[1]
        free.close()
        with held_for_servers("127.0.0.1", [port, free_port]):
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
            with socket.socket() as outgoing, pytest.raises(OSError, match="in use"):
                outgoing.bind(("127.0.0.1", free_port))


def test_an_outgoing_connection_that_has_the_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2) as outgoing,
    ):
        port = outgoing.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} .*an outgoing connection of .*pid {os.getpid()}"):
            check_port_free("127.0.0.1", port)


def test_a_port_whose_outgoing_connection_has_ended_is_said_to_be_taken_for_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing = socket.create_connection(server.getsockname(), timeout=2)
        port = outgoing.getsockname()[1]
        accepted, _ = server.accept()
        with accepted:
            outgoing.close()
            assert accepted.recv(1) == b""
    with pytest.raises(PortTaken, match=rf"port {port} .*held by an outgoing connection that has ended, for at most a"):
        check_port_free("127.0.0.1", port)
