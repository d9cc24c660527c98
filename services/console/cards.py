"""Items as cards in a grid. A card stays the same element while its item is shown, so the browser can move it."""

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from services.console.frame import box, button, text


@dataclass(frozen=True, slots=True)
class Shown:
    """An item on a card. why: what found the item, if it was not the model alone; else ""."""

    item_id: str
    title: str = ""
    categories: Sequence[str] = ()
    score: float = 0.0
    why: str = ""


@dataclass(slots=True)
class _Card:
    item: Shown
    element: Element
    rank: TextElement
    move: TextElement
    score: TextElement
    place: int = 0


class Cards:
    """The grid. act: called with an item and a button's event type. similar: shows items similar to an item id."""

    def __init__(self, act: Callable[[Shown, str], Awaitable[None]], similar: Callable[[str], Awaitable[None]]) -> None:
        self._act, self._similar = act, similar
        # Type of event and icon of each button.
        self.actions: Sequence[tuple[str, str]] = ()
        # Returns the address of the page that explains why an item is in the grid.
        self.why: Callable[[str], str] = lambda item_id: ""
        self._grid = box("ol", "cards", aria_label="Items, best first")
        self._empty = text("p", "Nothing is left to answer: take a filter away.", "hint")
        self._empty.set_visibility(False)
        self._cards: dict[str, _Card] = {}
        self._titles: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._cards)

    def title_of(self, item_id: str) -> str:
        """Return the item's title on a card, of now or before; the id if it has none."""
        return self._titles.get(item_id) or item_id

    def set_read_only(self, is_read_only: bool) -> None:
        """Hide or show the buttons that write events."""
        self._grid.classes(**{"add" if is_read_only else "remove": "read-only"})

    def show(self, items: Sequence[Shown], *, moves: bool) -> None:
        """Show these items in this order. moves: show on each card how far it moved."""
        wanted = {item.item_id for item in items}
        for item_id in [one for one in self._cards if one not in wanted]:
            self._cards.pop(item_id).element.delete()
        before = len(self._cards)
        for place, item in enumerate(items, 1):
            card = self._cards.get(item.item_id)
            is_new = card is None
            if card is None:
                card = self._cards[item.item_id] = self._make(item)
            self._say_move(card, place, is_new=is_new and before > 0, moves=moves)
            self._place(card, item, place)
        self._grid.default_slot.children[:] = [self._cards[item.item_id].element for item in items]
        self._grid.update()
        self._empty.set_visibility(not items)

    def add(self, items: Sequence[Shown]) -> None:
        """Add these items after the shown ones."""
        for item in items:
            if item.item_id not in self._cards:
                card = self._cards[item.item_id] = self._make(item)
                self._place(card, item, len(self._cards))

    def _place(self, card: _Card, item: Shown, place: int) -> None:
        card.place = place
        card.rank.set_text(str(place))
        card.score.set_text(f"{item.score:.3f}")

    def _say_move(self, card: _Card, place: int, *, is_new: bool, moves: bool) -> None:
        up = card.place - place
        label, kind = "", ""
        if moves and is_new:
            label, kind = "new", "new"
        elif moves and card.place and up:
            label, kind = (f"▲ {up}", "up") if up > 0 else (f"▼ {-up}", "down")
        card.move.set_text(label)
        card.move.classes(replace=f"move {kind}")

    def _make(self, item: Shown) -> _Card:
        self._titles[item.item_id] = item.title
        name = item.title or item.item_id
        with self._grid:
            element = box("li", "card", data_item=item.item_id)
        hue = zlib.crc32(",".join(item.categories or [item.item_id]).encode()) % 360
        element.style(f"--hue: {hue}")
        with element:
            with box("div", "card-top"):
                rank = text("span", "", "rank")
                move = text("span", "", "move")
                score = text("span", "", "score", title="Score: similarity of user and item, and votes of neighbours")
            text("h3", name, "isolated title")
            with box("p", "tags"):
                for category in item.categories[:4]:
                    text("span", category, "tag isolated")
                if item.why:
                    text("span", item.why, "tag why")
            with box("div", "acts"):
                for kind, icon in self.actions:
                    act = partial(self._act, item, kind)
                    button("", act, icon=icon, classes=f"act {kind}", about=f"{kind.capitalize()}: {name}")
                similar = partial(self._similar, item.item_id)
                button("", similar, icon="join_inner", classes="act", about=f"Similar: {name}")
                with box("a", "act", aria_label=f"Why: {name}", title=f"Why: {name}", href=self.why(item.item_id)):
                    ui.icon("help_outline").props("aria-hidden=true")
        return _Card(item, element, rank, move, score)
