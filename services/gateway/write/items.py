"""Put items with their metadata to the topic of the catalogue, which every process reads.

Each item is written whole under its id, so requests are idempotent. A rejected request has written nothing; a failed
one may have written some.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.contracts.topics.items import CatalogueItem, check_kinds, validate_item
from services.gateway.ports import Log
from services.gateway.write.writes import RETRY_AFTER_MS, write_timeout_s
from services.platform.errors import DependencyUnavailable, FreshetError, InvalidRequest
from services.platform.large_requests import in_turn, side_by_side

MAX_ITEMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItems:
    """The handler."""

    log: Log[CatalogueItem]
    kinds: Mapping[str, str]
    append_timeout_s: float = 1.5

    async def __call__(self, items: Sequence[CatalogueItem]) -> int:
        """Write all items; return their number.

        Raises: InvalidRequest with the first item that breaks a limit, before anything is written;
        DependencyUnavailable with a retry hint if the log did not acknowledge all of them.
        """
        await in_turn(_check, items, self.kinds)
        timeout_s = write_timeout_s(self.append_timeout_s, "the items")
        outcomes = await side_by_side([self.log.append(item, timeout_s) for item in items])
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            failure = next((f for f in failures if not isinstance(f, FreshetError)), failures[0])
            if not isinstance(failure, DependencyUnavailable):
                raise failure
            written = len(items) - len(failures)
            raise DependencyUnavailable(
                f"{failure.message}; {written} of {len(items)} items were acknowledged, send all again",
                retry_after_ms=RETRY_AFTER_MS,
            ) from failure
        return len(items)


def _check(items: Sequence[CatalogueItem], kinds: Mapping[str, str]) -> None:
    if not 1 <= len(items) <= MAX_ITEMS:
        raise InvalidRequest.of("items", f"{len(items)} items", f"1-{MAX_ITEMS}")
    first_at: dict[str, int] = {}
    for position, item in enumerate(items):
        try:
            validate_item(item)
            check_kinds(item, kinds, unknown=True)
        except InvalidRequest as exc:
            raise InvalidRequest(f"items[{position}].{exc.message}") from exc
        if (first := first_at.setdefault(item.item_id, position)) != position:
            raise InvalidRequest.of(f"items[{position}].item_id", f"that of items[{first}]", "each item once")
