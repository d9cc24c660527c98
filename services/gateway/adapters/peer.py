"""What stands behind the gateway's ports for candidates and the reranker: replicas elsewhere, or this process."""

from collections.abc import Callable
from typing import Any, Protocol


class Peer(Protocol):
    """A process that answers RPCs, wherever it runs."""

    async def call(
        self,
        stub: Any,
        method: str,
        request: Any,
        *,
        timeout_s: float,
        peer: str,
        check: Callable[[Any], None] = lambda response: None,
    ) -> Any:
        """Await `method` of `stub`, a call that may be repeated, within `timeout_s` in all.

        check: raises PreconditionFailed for an answer that is of no use here. Raises: as `rpc_client.call`.
        """

    async def close(self) -> None:
        """No call comes any more."""
