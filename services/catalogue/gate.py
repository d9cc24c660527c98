"""Nothing is answered before the catalogue's topics were read to their ends once: it might have been withdrawn.

A process that holds items asks the gate in front of each answer; its health says why it is not ready. What happens to
the topics afterwards does not close it again: what was read by then is known.
"""

from services.platform.errors import DependencyUnavailable
from services.platform.rpc.server import HealthState

NOT_READ = "the catalogue's topics were not read to their ends yet, so what is withdrawn is not known; Kafka is needed"


class CatalogueGate:
    """Closed until `open`, which may be called from any thread."""

    def __init__(self, process: str, health: HealthState) -> None:
        self._process, self._health, self._is_open = process, health, False
        health.set_ready(False, NOT_READ)

    def open(self) -> None:
        """Both ends were reached, or there are no topics to be read."""
        self._is_open = True
        self._health.set_ready(True)

    def check(self) -> None:
        """Raises: DependencyUnavailable while closed."""
        if not self._is_open:
            raise DependencyUnavailable(f"{self._process} is not ready: {NOT_READ}")
