"""Taken TCP ports, named together with the process that holds them."""

import socket

import psutil


class PortTaken(RuntimeError):
    """Somebody else listens where we wanted to; the message names the port, its owner and what to do."""

    def __init__(self, host: str, port: int, owner: str | None, *, purpose: str = "gRPC") -> None:
        held = f"held by {owner}" if owner else "held by another process (its owner is not visible to this user)"
        super().__init__(f"port {port} on {host} ({purpose}) is taken: {held}; stop it or choose another port")
        self.port = port
        self.owner = owner


def port_owner(port: int) -> str | None:
    """Name and pid of the process that listens on `port`, or None when nobody does or it can't be seen."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
            continue
        if connection.laddr.port == port:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None


def check_port_free(host: str, port: int) -> None:
    """Raise PortTaken when nothing can be bound to host:port. Port 0 is always free."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is not taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PortTaken(host, port, port_owner(port)) from exc
