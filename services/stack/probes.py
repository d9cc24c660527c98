"""Probe parts with one short request in their own protocol.

A probe returns None if the part is ready, else the reason.
"""

import socket
import struct

TIMEOUT_S = 1.0
_METADATA_KEY, _METADATA_VERSION = 3, 1


def probe_kafka(address: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Probe Kafka, which is ready when its metadata has a broker.

    The request is encoded here, because kafka-python's clients retry and block for too long.
    """
    client_id = b"freshet-probe"
    body = struct.pack(">hhih", _METADATA_KEY, _METADATA_VERSION, 1, len(client_id)) + client_id + struct.pack(">i", 0)
    try:
        with _connect(address, timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            (size,) = struct.unpack(">i", _read(connection, 4))
            reply = _read(connection, size)
    except OSError as exc:
        return f"no answer at {address} ({exc})"
    correlation, num_brokers = struct.unpack(">ii", reply[:8])
    if correlation != 1 or num_brokers < 1:
        return f"{address} answers, but no broker is registered yet"
    return None


def probe_redis(address: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Redis is not ready while it loads its file."""
    try:
        with _connect(address, timeout_s) as connection:
            connection.sendall(b"PING\r\n")
            reply = connection.recv(256)
    except OSError as exc:
        return f"no answer at {address} ({exc})"
    return None if reply.startswith(b"+PONG") else f"{address} answers {reply[:80]!r}"


def probe_inference_server(address: str, model: str = "encoder", timeout_s: float = TIMEOUT_S) -> str | None:
    """Whether server and model are ready."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if not stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s).ready:
                return f"{address} answers, but is not ready"
            if not stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout_s).ready:
                return f"model {model!r} is not ready at {address}"
        except grpc.RpcError as exc:
            return f"no answer at {address} ({exc.code().name})"
    return None


def _connect(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout_s)
    connection.settimeout(timeout_s)
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection ended early")
        data += part
    return data


def silence(address: str) -> str | None:
    """Return why no connection is possible, at a tenth of a client's cost."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError as exc:
        return f"no answer at {address} ({exc})"
    return None
