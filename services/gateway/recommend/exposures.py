"""Exposures: each answer's exposure id, and its record in the log. An id contains the answer's time and is signed for
the user, so checking it needs no stored state.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from services.contracts.experiments import Assignment
from services.contracts.topics.exposures import Exposure
from services.gateway.domain import assigned_texts, now_ms
from services.gateway.edge.signing import Altered, OfAnotherUser, Signer
from services.gateway.ports import ExposureLog
from services.platform.errors import InvalidRequest, PermissionDenied

_TIME_BYTES, _NONCE_BYTES = 6, 4
_BODY_BYTES = _TIME_BYTES + _NONCE_BYTES


class Exposures:
    """Issues exposure ids and records exposures. log: None records nothing."""

    def __init__(self, key: bytes, log: ExposureLog | None, clock_ms: Callable[[], int] = now_ms) -> None:
        self._signer, self._log, self._clock_ms = Signer(key, b"exposure"), log, clock_ms

    def shown(self, surface: str, user_id: str, *, assignments: Sequence[Assignment] = (), **fields: Any) -> str:
        """Return the exposure id of an answer sent now. user_id: "" for a visitor. fields: those of `Exposure`."""
        shown_ms = self._clock_ms()
        exposure_id = self._signer.sign(shown_ms.to_bytes(_TIME_BYTES, "big") + os.urandom(_NONCE_BYTES), user_id)
        arms = assigned_texts(assignments)
        one = Exposure(exposure_id=exposure_id, shown_ms=shown_ms, surface=surface, assignments=arms, **fields)
        if self._log is not None:
            self._log.append(user_id, one)
        return exposure_id

    def time_of(self, exposure_id: str, user_id: str) -> int:
        """Return the answer's time, Unix milliseconds.

        Raises: InvalidRequest; PermissionDenied for another user's id.
        """
        try:
            body = self._signer.open(exposure_id, _BODY_BYTES, user_id)
        except Altered:
            shown = f"text of {len(exposure_id)} characters"
            raise InvalidRequest.of("exposure_id", shown, "as an answer of this installation gave it") from None
        except OfAnotherUser:
            raise _foreign("exposure_id") from None
        return int.from_bytes(body[:_TIME_BYTES], "big")

    def check_named(self, exposure_id: str, user_id: str, field: str) -> None:
        """Check an interaction's exposure id. Clients may have their own ids: only another user's id is wrong.

        Raises: PermissionDenied.
        """
        try:
            self._signer.open(exposure_id, _BODY_BYTES, user_id)
        except Altered:
            return
        except OfAnotherUser:
            raise _foreign(field) from None


def _foreign(field: str) -> PermissionDenied:
    return PermissionDenied(f"{field}: of an answer to another user; allowed: of an answer to this one")
