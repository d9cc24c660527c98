"""RecordImpressions: seen positions of an answer, written as interactions.

The exposure id contains the answer's time and user, so a repeated request writes the same record, which counts once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.algorithms.bundles.event_schema import EventSchema, Role
from services.contracts.topics.interactions import Interaction
from services.gateway.domain import Impression, Receipt
from services.gateway.recommend.exposures import Exposures
from services.gateway.validation import MAX_BATCH
from services.gateway.write.record import RecordInteractions
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.validation import validate_id

IMPRESSION = "impression"
MAX_POSITION = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordImpressions:
    """The handler."""

    exposures: Exposures
    record: RecordInteractions
    schema: EventSchema

    async def __call__(self, user_id: str, exposure_id: str, impressions: Sequence[Impression]) -> list[Receipt]:
        """Write impressions; return receipts in order.

        Raises: InvalidRequest, PermissionDenied for another user's exposure, PreconditionFailed if the model's schema
        gives impressions another role, before anything is written; and as RecordInteractions.
        """
        validate_id("user_id", user_id)
        if not 1 <= len(impressions) <= MAX_BATCH:
            raise InvalidRequest.of("impressions", f"{len(impressions)} impressions", f"1-{MAX_BATCH}")
        if self.schema.of(IMPRESSION).role is not Role.EXPOSURE:
            raise PreconditionFailed(
                f"events.yaml of the served model: type {IMPRESSION!r} has another role; allowed: exposure. Train with "
                "a schema that gives it this role, or record interactions of a type of your own"
            )
        shown_ms = self.exposures.time_of(exposure_id, user_id)
        positions = set[int]()
        for number, one in enumerate(impressions):
            validate_id(f"impressions[{number}].item_id", one.item_id)
            if not 1 <= one.position <= MAX_POSITION or one.position in positions:
                allowed = f"1-{MAX_POSITION}, each once"
                raise InvalidRequest.of(f"impressions[{number}].position", one.position, allowed)
            positions.add(one.position)
        return await self.record.write(
            [
                Interaction(
                    user_id=user_id,
                    item_id=one.item_id,
                    # A position counts once, even if a later request names another item.
                    event_id=f"impression-{_digest(exposure_id, one.position)}",
                    type=IMPRESSION,
                    event_time_ms=shown_ms,
                    context={"position": str(one.position)},
                    exposure_id=exposure_id,
                )
                for one in impressions
            ]
        )


def _digest(exposure_id: str, position: int) -> str:
    return hashlib.blake2b(f"{exposure_id}\0{position}".encode(), digest_size=16).hexdigest()
