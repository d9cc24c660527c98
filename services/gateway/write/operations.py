"""Write an operator's change to its topic, if the operator saw the last revision."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.contracts.operation_record import Control
from services.contracts.operations import Revised
from services.platform.errors import Conflict
from services.platform.rpc import request_context

S = TypeVar("S", bound=Revised)
_APPLIED_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operate(Generic[S]):
    """One topic. initial: returns the first state, or raises. applied: returns the revision in force here."""

    control: Control[S]
    initial: Callable[[], S]
    applied: Callable[[], int]

    async def __call__(self, expected_revision: int, change: Callable[[S], S], operation: str) -> tuple[int, bool]:
        """Return the new revision, and whether this gateway applies it.

        Raises: Conflict with the current revision; as `change` and `Control.write`.
        """
        revision = await asyncio.to_thread(self._written, expected_revision, change, operation)
        until = time.monotonic() + _APPLIED_S
        while True:
            if (is_applied := self.applied() >= revision) or time.monotonic() > until:
                return revision, is_applied
            await asyncio.sleep(0.02)

    def _written(self, expected: int, change: Callable[[S], S], operation: str) -> int:
        last = self.control.read().last
        present = self.initial() if last is None else last.after
        if present.revision != expected:
            raise Conflict(f"expected_revision={expected} allowed: {present.revision}, the present one")
        operator = request_context.caller.get() or "a caller without a key"
        return self.control.write(change(present), operation, operator).revision
