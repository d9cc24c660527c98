"""The log of exposures while the broker is away: answers never wait, and what is lost is counted."""

import asyncio
import socket
import time

from services.contracts.topics.exposures import Exposure
from services.gateway.adapters.topics import MAX_WAITING, KafkaExposureLog

ONE = Exposure(exposure_id="e", shown_ms=5, surface="recommend", model_version="m1")


async def test_what_cannot_be_written_or_finds_the_queue_full_is_lost_and_counted() -> None:
    lost: list[int] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Bound, not listening: nobody answers there.
        nowhere = f"127.0.0.1:{probe.getsockname()[1]}"
        log = KafkaExposureLog(nowhere, b"key", count=lambda written, gone: lost.append(gone), gather_s=60)
        log.start()
        began = time.process_time()
        for _ in range(MAX_WAITING + 7):
            log.append("ann", ONE)
        assert time.process_time() - began < 1
        assert lost == [1] * 7
        await asyncio.wait_for(log.close(30), 40)
    assert lost[7:] == [MAX_WAITING]
