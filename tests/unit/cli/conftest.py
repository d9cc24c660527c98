"""A gateway in memory, on loopback."""

from collections.abc import Iterator

import pytest

from tests.unit.cli.gateway_on_loopback import MemoryGateway, running_gateway


@pytest.fixture
def gateway() -> Iterator[tuple[str, MemoryGateway]]:
    with running_gateway() as running:
        yield running
