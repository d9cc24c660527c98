"""Exposures: each answer's exposure id, and its record in the log.

An exposure id contains its answer's time and is signed for its user, so no stored state is needed to check it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from services.contracts.experiments import Assignment
from services.contracts.topics.exposures import Exposure
from services.gateway.domain import now_ms
from services.gateway.edge.signing import Altered, OfAnotherUser, Signer
from services.gateway.experiments.arms import assigned_texts
from services.gateway.ports import ExposureLog
from services.platform.errors import InvalidRequest, PermissionDenied

_TIME_BYTES, _NONCE_BYTES = 6, 4
_BODY_BYTES = _TIME_BYTES + _NONCE_BYTES


class Exposures:
    """One per process. log None: ids are issued, nothing is recorded."""

    def __init__(self, key: bytes, log: ExposureLog | None, clock_ms: Callable[[], int] = now_ms) -> None:
        self._signer, self._log, self._clock_ms = Signer(key, b"exposure"), log, clock_ms

    def shown(
        self,
        surface: str,
        user_id: str,
        *,
        item_ids: Sequence[str],
        scores: Sequence[float],
        sources: Sequence[str],
        propensities: Sequence[float] = (),
        model_version: str,
        index_version: str = "",
        text_version: str = "",
        first_position: int = 1,
        context: Mapping[str, str] = MappingProxyType({}),
        absence_bucket: int = 0,
        assignments: Sequence[Assignment] = (),
        teams: Sequence[int] = (),
        rules_revision: int = 0,
    ) -> str:
        """Return the exposure id of an answer sent now; an empty user id is a visitor without one."""
        shown_ms = self._clock_ms()
        exposure_id = self._signer.sign(shown_ms.to_bytes(_TIME_BYTES, "big") + os.urandom(_NONCE_BYTES), user_id)
        if self._log is not None:
            self._log.append(
                user_id,
                Exposure(
                    exposure_id=exposure_id,
                    shown_ms=shown_ms,
                    surface=surface,
                    model_version=model_version,
                    index_version=index_version,
                    text_version=text_version,
                    first_position=first_position,
                    item_ids=item_ids,
                    scores=scores,
                    sources=sources,
                    propensities=propensities,
                    context=context,
                    absence_bucket=absence_bucket,
                    assignments=assigned_texts(assignments),
                    teams=teams,
                    rules_revision=rules_revision,
                ),
            )
        return exposure_id

    def time_of(self, exposure_id: str, user_id: str) -> int:
        """Return when the answer was given, Unix milliseconds. Raises: InvalidRequest for an id not issued here,
        PermissionDenied for another user's.
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
        """Check an interaction's exposure id: producers may have their own ids, so only an id known to be another
        user's is wrong.

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
