"""States of new items from their texts, until they have enough interactions.

A text takes about 10 ms, so it is encoded once, and callers ask for few at a time.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.algorithms.scoring.states import ItemStates
from services.refresher.domain.records import Listing


class Texts(Protocol):
    """Item states from titles and categories: `services.algorithms.pefa.content.TextStates`."""

    def of(self, titles: Sequence[str], categories: Sequence[Sequence[str]]) -> ItemStates:
        """States of B items."""


class ContentStates:
    """The listed items' texts, and states so far."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._listings: dict[str, Listing] = {}
        self._states: dict[str, ItemStates] = {}

    def put(self, listing: Listing) -> None:
        """Store a listing; a changed text drops its state."""
        if listing != self._listings.get(listing.item_id):
            self._listings[listing.item_id] = listing
            self._states.pop(listing.item_id, None)

    def __contains__(self, item_id: object) -> bool:
        listing = self._listings.get(str(item_id))
        return listing is not None and bool(listing.title or listing.categories)

    def of(self, item_ids: Sequence[str]) -> ItemStates:
        """The states of one or more items with texts."""
        new = [self._listings[item_id] for item_id in item_ids if item_id not in self._states]
        if new:
            made = self._texts.of([one.title for one in new], [one.categories for one in new])
            for row, listing in enumerate(new):
                gate = None if made.gate is None else made.gate[row : row + 1]
                self._states[listing.item_id] = ItemStates(components=made.components[row : row + 1], gate=gate)
        states = [self._states[item_id] for item_id in item_ids]
        gates = [state.gate for state in states if state.gate is not None]
        return ItemStates(
            components=np.concatenate([state.components for state in states]),
            gate=np.concatenate(gates) if gates else None,
        )
