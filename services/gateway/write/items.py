"""Write items to the topic `items`, which every process reads. A failed request may have written some items.

Each record is a whole item. An edit of some fields is merged into the gateway's copy of the item, written, and read
back. If another process wrote the item after that copy, the edit is merged into that record and written again. A
gateway's edits run one after the other. One case loses A's first edit: gateways A and B edit one item at once, and A
edits it again in the milliseconds before B writes it again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.contracts.topics.items import CatalogueItem, check_kinds, validate_item
from services.gateway.ports import Log
from services.gateway.recommend.popular import PopularItems
from services.gateway.stages import Limits
from services.gateway.write.record import RETRY_AFTER_MS, write_timeout_s
from services.platform.errors import DeadlineExceeded, DependencyUnavailable, FreshetError, InvalidRequest, NotFound
from services.platform.threads import in_turn, side_by_side

MAX_ITEMS = 1000
FIELDS = ("title", "categories", "available", "withdrawn", "attributes")
_ONE = "attributes."
_LOOK_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItems:
    """The handler. items: this version set's catalogue. others: returns the other sets' catalogues."""

    log: Log[CatalogueItem]
    kinds: Mapping[str, str]
    items: PopularItems
    others: Callable[[], Sequence[PopularItems]] = tuple
    limits: Limits
    _edits: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, items: Sequence[CatalogueItem], fields: Sequence[str] = ()) -> int:
        """Write the items, or only these fields; return the number of items.

        Raises: InvalidRequest; NotFound for an edit of an unknown item; DeadlineExceeded if an edit takes too long;
        DependencyUnavailable with a retry hint if not all were acknowledged.
        """
        await in_turn(_check, items, self.kinds)
        if not fields:
            await self._write(items)
            return len(items)
        _check_fields(items, fields, self.kinds)
        try:
            async with asyncio.timeout(write_timeout_s(self.limits.edit_timeout_s, "the items")), self._edits:
                await self._edit(items, fields)
        except TimeoutError as exc:
            raise DeadlineExceeded("the edit was not read back in time; send it again") from exc
        return len(items)

    async def _edit(self, items: Sequence[CatalogueItem], fields: Sequence[str]) -> None:
        if not self.items.knows_withdrawn:
            raise DependencyUnavailable("the catalogue's topic was not read yet", retry_after_ms=RETRY_AFTER_MS)
        waiting = {one.item_id: one for one in items}
        with self.items.watch(waiting) as watched:
            since = dict.fromkeys(waiting, self.items.applied)
            merged = [edited(self._present(one.item_id), one, fields) for one in items]
            while merged:
                for one in merged:
                    validate_item(one)
                offsets = await self._write(merged)
                while self.items.applied < max(offsets):  # noqa: ASYNC110 (another thread applies)
                    await asyncio.sleep(_LOOK_AGAIN_S)
                again = []
                for one, offset in zip(merged, offsets, strict=True):
                    between = [other for other in watched[one.item_id] if since[one.item_id] < other.offset < offset]
                    if between:
                        again.append(edited(between[-1], waiting[one.item_id], fields))
                    since[one.item_id] = offset
                merged = again

    def _present(self, item_id: str) -> CatalogueItem:
        found = self.items.item(item_id)
        if found is None:
            raise NotFound(f"the catalogue has no item {item_id!r}; an edit of some fields needs a known one")
        # Another set's bundle may declare other attributes.
        of_others = [other.item(item_id) for other in self.others()]
        undeclared = {name: value for other in of_others if other for name, value in other.item.attributes.items()}
        undeclared = {name: value for name, value in undeclared.items() if name not in self.kinds}
        return replace(found.item, undeclared={**undeclared, **found.item.undeclared})

    async def _write(self, items: Sequence[CatalogueItem]) -> list[int]:
        timeout_s = write_timeout_s(self.limits.append_timeout_s, "the items")
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
        return [outcome.offset for outcome in outcomes if not isinstance(outcome, BaseException)]


def edited(present: CatalogueItem, edit: CatalogueItem, fields: Sequence[str]) -> CatalogueItem:
    changes = {name: getattr(edit, name) for name in fields if name in FIELDS}
    attributes = dict(changes.get("attributes", present.attributes))
    for name in (name.removeprefix(_ONE) for name in fields if name.startswith(_ONE)):
        attributes.pop(name, None)
        if name in edit.attributes:
            attributes[name] = edit.attributes[name]
    return replace(present, **{**changes, "attributes": attributes})


def _check_fields(items: Sequence[CatalogueItem], fields: Sequence[str], kinds: Mapping[str, str]) -> None:
    allowed = [*FIELDS, *(_ONE + name for name in kinds)]
    for position, name in enumerate(fields):
        if name not in allowed:
            raise InvalidRequest.of(f"fields[{position}]", name[:64], ", ".join(allowed))
    for position, item in enumerate(items):
        if "title" in fields and not item.title:
            raise InvalidRequest.of(f"items[{position}].title", "", "1-512 bytes: an empty title leaves the known one")


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
