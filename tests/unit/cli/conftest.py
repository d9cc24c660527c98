"""A gateway in memory, on loopback."""

from collections.abc import Iterator

import pytest

from tests.unit.cli.gateway_on_loopback import MemoryGateway, running_gateway


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryGateway]:
    """The gateway that commands call."""
    with running_gateway() as (target, server):
        monkeypatch.setenv("FRESHET_GATEWAY", target)
        yield server
