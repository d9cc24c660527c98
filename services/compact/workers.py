"""Several workers behind one port (SO_REUSEPORT).

The parent starts, restarts and ends the workers. Each worker is a whole compact gateway; they share the memory of
mapped bundle files. No worker listens before all are ready, because the first one would get every connection. The first
worker writes dead letters and snapshots. Workers accept each other's signatures; each limits an API key's rate
separately.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING

import structlog
from pydantic import Field

from services.platform.config import ProcessSettings
from services.platform.errors import DependencyUnavailable
from services.platform.machine import check_port_free

if TYPE_CHECKING:
    from services.platform.rpc.server import HealthState

log = structlog.get_logger()

SIGNING_KEY = "FRESHET_GATEWAY_SIGNING_KEY"
COUNT, WORKER = "FRESHET_COMPACT_WORKERS", "FRESHET_COMPACT_WORKER"
_DOOR = "FRESHET_COMPACT_DOOR"  # socket on which a worker reports that it is ready, and receives "go"
_AGAIN_AFTER_S = 1.0
_LOOK_EVERY_S = 0.05
_PR_SET_PDEATHSIG = 1


class WorkersSettings(ProcessSettings):
    """The parent's settings."""

    port: int = Field(default=50050, ge=0, le=65535, validation_alias="FRESHET_GATEWAY_PORT")
    workers: int = Field(default=1, ge=1, le=8, validation_alias=COUNT)


async def may_listen(health: "HealthState") -> None:
    """Wait in a worker until all workers are ready."""
    while not health.ready:  # noqa: ASYNC110  # threads set it
        await asyncio.sleep(_LOOK_EVERY_S)
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=int(os.environ[_DOOR])) as door:
        door.setblocking(False)
        await loop.sock_sendall(door, b".")
        await loop.sock_recv(door, 1)


async def keep_workers(settings: WorkersSettings) -> None:
    """Start and restart workers until a signal.

    Raises: PortTaken; DependencyUnavailable if one ended before all were ready.
    """
    check_port_free(settings.host, settings.port)
    await _Workers(settings).run()


class _Workers:
    def __init__(self, settings: WorkersSettings) -> None:
        self._settings = settings
        self._shared = {} if _has_signing_key() else {SIGNING_KEY: secrets.token_urlsafe(32)}
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._num_ready, self._all_ready, self._stops = 0, asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Run until a signal, or until a worker ends before all are ready."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(self._settings.workers)]
        try:
            await asyncio.gather(*keepers)
        finally:
            self._stop()
            await asyncio.gather(*keepers, return_exceptions=True)

    def _stop(self) -> None:
        self._stops.set()
        for worker in self._running.values():
            if worker.returncode is None:
                worker.terminate()

    async def _keep(self, number: int) -> None:
        while not self._stops.is_set():
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with ours:
                with theirs:
                    worker = self._running[number] = await self._start(number, theirs.fileno())
                letting = asyncio.create_task(self._let_listen(ours))
                status = await worker.wait()
                letting.cancel()
                await asyncio.wait([letting])
            if self._stops.is_set():
                return
            log.error("worker_ended", worker=number, status=status)
            if not self._all_ready.is_set():
                raise DependencyUnavailable(f"worker {number} ended with status {status} while starting")
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def _let_listen(self, worker: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if not await loop.sock_recv(worker, 1):
            return
        self._num_ready += 1
        if self._num_ready == self._settings.workers:
            self._all_ready.set()
        await self._all_ready.wait()
        await loop.sock_sendall(worker, b".")

    async def _start(self, number: int, door: int) -> asyncio.subprocess.Process:
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.compact",
            env=os.environ | self._shared | {WORKER: str(number), _DOOR: str(door)},
            pass_fds=(door,),
            preexec_fn=_ends_with_its_parent,
        )
        if self._stops.is_set():
            started.terminate()
        return started


def _has_signing_key() -> bool:
    return bool(os.environ.get(SIGNING_KEY) or os.environ.get(f"{SIGNING_KEY}_FILE"))


def _ends_with_its_parent() -> None:
    """Let the kernel end this worker when its parent ends, which frees the port. Runs between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
