"""What strangers do to the JSON port before a key is asked for: endless headers, bodies, silence, many connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from gateway_scene import Scene
from test_by_http import Door, doors

from services.gateway.edge.api_keys import Role, create_key
from services.platform.http import connections as http_connections

_PATH = "/freshet.v1.GatewayService/Recommend"
_HEAD = f"POST {_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(door: Door, sent: str = "") -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        writer.write(sent.encode())
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def all_of(reader: asyncio.StreamReader) -> str:
    """What comes until the connection is closed."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            while part := await reader.read(65536):
                said += part
    return said.decode()


async def is_served(door: Door, **headers: str) -> bool:
    return (await door.post("Recommend", {"userId": "ann", "k": 2}, **headers))[0] == 200


@pytest.mark.parametrize("endless", ["x-name: " + "a" * 60_000, "x: y\r\n" * 10_000, "X" * 60_000])
async def test_a_header_without_an_end_is_refused(endless: str) -> None:
    async with doors(Scene()) as door, connected(door, _HEAD) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(endless.encode())
                await writer.drain()
        said = await all_of(reader)
        assert not said or said.endswith(f"header of more than {http_connections.MAX_HEADER_BYTES} bytes")
        assert await is_served(door)


@pytest.mark.parametrize("begun", ["", "\r\n", "POST", _HEAD], ids=["silent", "blank", "half a line", "half a header"])
async def test_who_sends_no_whole_header_is_disconnected(begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "HEADER_S", 0.2)
    async with doors(Scene()) as door, connected(door, begun) as (reader, _):
        assert await all_of(reader) == ""
        assert await is_served(door)


async def test_who_sends_no_whole_body_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "BODY_S", 0.2)
    async with doors(Scene()) as door, connected(door, f'{_HEAD}content-length: 99\r\n\r\n{{"userId"') as (reader, _):
        assert await all_of(reader) == ""
        assert await is_served(door)


async def test_a_connection_serves_one_request_after_another_and_slow_ones_in_time() -> None:
    body = '{"userId": "ann", "k": 1}'
    request = f"{_HEAD}content-length: {len(body)}\r\n\r\n{body}"
    async with doors(Scene()) as door, connected(door) as (reader, writer):
        for _ in range(3):
            for part in (request[:30], request[30:-5], request[-5:]):
                writer.write(part.encode())
                await writer.drain()
                await asyncio.sleep(0)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 200")
            assert "connection: close" not in head
            await reader.readuntil(b"0\r\n\r\n")


async def test_a_key_is_asked_for_before_the_body(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))
    async with doors(Scene(), api_keys=path, audit_log=tmp_path / "audit.log") as door:
        # Not a byte of 4 MB is sent, and the answer is there.
        async with connected(door, f"{_HEAD}content-length: 4000000\r\n\r\n") as (reader, _):
            said = await all_of(reader)
        assert said.startswith("HTTP/1.1 401")
        assert "no API key: send the metadata authorization" in said
        health = _HEAD.replace("freshet.v1.GatewayService/Recommend", "grpc.health.v1.Health/Check")
        async with connected(door, f"{health}content-length: 2\r\n\r\n{{}}") as (reader, _):
            assert (await all_of(reader)).startswith("HTTP/1.1 200")
        async with connected(door, f"{health}content-length: 4000000\r\n\r\n{' ' * 4096}") as (reader, _):
            assert "JSON: Expecting value: line 1 column 4097" in await all_of(reader)
        assert await is_served(door, authorization=f"Bearer {secret}")


async def test_by_grpc_a_strangers_message_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with doors(Scene(), api_keys=path, audit_log=tmp_path / "audit.log") as door:
        call = door.channel.stream_unary(_PATH)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(nothing(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.details() == "no API key: send the metadata authorization: Bearer <key>"
        assert (tmp_path / "audit.log").read_text().count("UNAUTHENTICATED") == 1
        await door.channel.unary_unary(_PATH)(
            b"\x0a\x03ann\x10\x02", timeout=20, metadata=(("authorization", f"Bearer {secret}"),)
        )


@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS", "MAX_OF_ADDRESS"])
async def test_silent_connections_make_room_for_others(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, limit, 8)
    async with doors(Scene()) as door, contextlib.AsyncExitStack() as crowd:
        silent = [await crowd.enter_async_context(connected(door)) for _ in range(30)]
        assert await is_served(door)
        # The oldest had to go; the newest are there.
        assert [await all_of(reader) for reader, _ in silent[:22]] == [""] * 22
        assert not silent[-1][0].at_eof()


async def test_busy_connections_do_not_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "MAX_OF_ADDRESS", 2)
    async with doors(Scene()) as door, contextlib.AsyncExitStack() as crowd:
        begun = f"{_HEAD}content-length: 25\r\n\r\n"
        busy = [await crowd.enter_async_context(connected(door, begun)) for _ in range(2)]
        for reader, _ in busy:
            # Until their headers are read, they are silent.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)
        async with connected(door, begun) as (reader, _):
            assert await all_of(reader) == ""
        for reader, writer in busy:
            writer.write(b'{"userId": "ann", "k": 1}')
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_an_upgrade_and_half_a_host_are_the_callers_fault() -> None:
    async with doors(Scene()) as door:
        upgrade = f"GET {_PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        handshake = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
        async with connected(door, upgrade + handshake) as (reader, _):
            assert "405" in (await reader.readline()).decode()
        status, said, _ = await door.post("Recommend", {"userId": "ann", "k": 2}, host="[::1")
    assert (status, said) == (403, b"host='[::1' allowed without API keys: localhost, 127.0.0.1, ::1\n")
