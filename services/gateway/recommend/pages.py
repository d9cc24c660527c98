"""A ranked list is stored for its user, who reads it page by page with signed tokens.

Changes of the index do not repeat or omit items on its pages. A list expires after 15 minutes, or when its user has
four newer lists.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.algorithms.indexes.protocol import Certificate
from services.contracts.topics.exposures import Exposure, decode_exposure, encode_exposure
from services.gateway.domain import Degradation, Ranking, ScoredItem
from services.gateway.recommend.exposures import Altered, OfAnotherUser, Signer, propensities_of
from services.platform.errors import InvalidRequest, PermissionDenied, PreconditionFailed
from services.user_state.values import now_ms

LIST_TTL_S = 15 * 60
MAX_LISTS = 4
_ID_BYTES, _TIME_BYTES, _OFFSET_BYTES = 5, 6, 3
_PLACE_BYTES = 1 + _OFFSET_BYTES
_BODY_BYTES = _ID_BYTES + _TIME_BYTES + _PLACE_BYTES
_GAP = struct.Struct(">d")  # the certificate's gap; NaN: an estimate
_ENDED = (
    f"page_token: its list is gone; allowed: within {LIST_TTL_S // 60} minutes, and for a user's {MAX_LISTS} newest "
    "lists only"
)


@dataclass(frozen=True, slots=True)
class PagePosition:
    """The start of the next page, after `offset` items. made_ms: Unix milliseconds. absence_bucket: the
    bucket of the state that ranked the list.
    """

    list_id: bytes
    made_ms: int
    offset: int
    absence_bucket: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedList:
    """A ranked list. Stored scores have single precision."""

    ranking: Ranking
    model_version: str
    degradations: Sequence[Degradation] = ()
    rules_revision: int = 0


class PageTokens:
    """Issues and reads tokens, without stored state."""

    def __init__(self, key: bytes, clock_ms: Callable[[], int] = now_ms) -> None:
        self._signer, self._clock_ms = Signer(key, b"page"), clock_ms

    def begin(self, offset: int, absence_bucket: int = 0) -> PagePosition:
        """Return a position in a new list, made now."""
        return PagePosition(os.urandom(_ID_BYTES), self._clock_ms(), offset, absence_bucket)

    def token(self, place: PagePosition, user_id: str) -> str:
        made, offset = place.made_ms.to_bytes(_TIME_BYTES, "big"), place.offset.to_bytes(_OFFSET_BYTES, "big")
        return self._signer.sign(place.list_id + made + bytes([place.absence_bucket]) + offset, user_id)

    def place(self, token: str, user_id: str) -> PagePosition:
        """Return the token's position.

        Raises: InvalidRequest, PermissionDenied for another user's token, PreconditionFailed for an expired list.
        """
        try:
            body = self._signer.open(token, _BODY_BYTES, user_id)
        except Altered:
            shown = f"text of {len(token)} characters"
            raise InvalidRequest.of("page_token", shown, "next_page_token of an earlier answer, unchanged") from None
        except OfAnotherUser:
            raise PermissionDenied("page_token: of another user's list; allowed: of a list of this user") from None
        list_id, made, rest = body[:_ID_BYTES], body[_ID_BYTES:-_PLACE_BYTES], body[-_PLACE_BYTES:]
        place = PagePosition(list_id, int.from_bytes(made, "big"), int.from_bytes(rest[1:], "big"), rest[0])
        if self._clock_ms() > place.made_ms + LIST_TTL_S * 1000:
            raise PreconditionFailed(_ENDED)
        return place


def packed_list(place: PagePosition, served: ServedList) -> bytes:
    """Return the stored bytes: list id, certificate, and an exposure whose context has the other fields."""
    items, certificate = served.ranking.items, served.ranking.certificate
    shown = Exposure(
        exposure_id=place.list_id.hex(),
        shown_ms=place.made_ms,
        surface="recommend",
        model_version=served.model_version,
        index_version=served.ranking.index_version,
        item_ids=[item.item_id for item in items],
        scores=[item.score for item in items],
        sources=[item.source for item in items],
        propensities=propensities_of(items),
        context={
            "degradations": json.dumps(served.degradations),
            "searched_share": json.dumps(served.ranking.searched_share),
            "rules": json.dumps({row: item.rules for row, item in enumerate(items) if item.rules}),
        },
        rules_revision=served.rules_revision,
    )
    return place.list_id + _GAP.pack(math.nan if certificate.gap is None else certificate.gap) + encode_exposure(shown)


def find_list(entries: list[bytes], place: PagePosition) -> ServedList:
    """Find the stored list. Raises: PreconditionFailed if it is gone."""
    for entry in entries:
        if entry[:_ID_BYTES] == place.list_id:
            (gap,) = _GAP.unpack_from(entry, _ID_BYTES)
            shown = decode_exposure(entry[_ID_BYTES + _GAP.size :])
            columns = shown.item_ids, shown.scores, shown.sources, shown.propensities or [1.0] * len(shown.item_ids)
            context = {name: json.loads(text) for name, text in shown.context.items()}
            rules = context["rules"]
            slots = enumerate(zip(*columns, strict=True))
            ranking = Ranking(
                items=[ScoredItem(*slot, tuple(rules.get(str(row), ()))) for row, slot in slots],
                certificate=Certificate(None if math.isnan(gap) else gap),
                index_version=shown.index_version,
                searched_share=context["searched_share"],
            )
            marks = [Degradation(number) for number in context["degradations"]]
            return ServedList(
                ranking=ranking,
                model_version=shown.model_version,
                degradations=marks,
                rules_revision=shown.rules_revision,
            )
    raise PreconditionFailed(_ENDED)
