"""Refuse requests until the catalogue's topics were read to their ends once, since items might have been withdrawn."""

from services.platform.errors import DependencyUnavailable
from services.platform.rpc.server import HealthState

NOT_READ = "the catalogue's topics were not read to their ends yet, so what is withdrawn is not known; Kafka is needed"


class CatalogueGate:
    """Closed until `open`, which is thread-safe. A process with items calls `check` before each answer."""

    def __init__(self, process: str, health: HealthState) -> None:
        self._process, self._health, self._is_open = process, health, False
        health.set_ready(False, NOT_READ)

    def open(self) -> None:
        """Open the gate for good."""
        self._is_open = True
        self._health.set_ready(True)

    def check(self) -> None:
        """Raise DependencyUnavailable while closed."""
        if not self._is_open:
            raise DependencyUnavailable(f"{self._process} is not ready: {NOT_READ}")
