"""Items as cards in a grid. A shown item keeps its element, so the browser can move it."""

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from freshet_client import ScoredItem
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from services.console.elements import box, button, text

EVENT_ICONS = {"like": "thumb_up", "dislike": "thumb_down", "hide": "visibility_off"}
Act = Callable[[ScoredItem, str], Awaitable[None]]
# By source of an item: the tag that says how it was found, "" for no tag. Other sources are shown by their names.
SOURCES = {"mol": "", "first_stage": "first stage"}


@dataclass(slots=True)
class _Card:
    element: Element
    rank: TextElement
    move: TextElement
    score: TextElement
    place: int = 0

    def put(self, item: ScoredItem, place: int) -> None:
        self.place = place
        self.rank.set_text(str(place))
        self.score.set_text(f"{item.score:.3f}")


class Cards:
    """The grid. `actions`: event types with a button. act, similar: called when an item's button is
    clicked. why: returns the address of the page that explains an item.
    """

    def __init__(self, act: Act, similar: Callable[[str], Awaitable[None]], why: Callable[[str], str]) -> None:
        self._act, self._similar, self._why = act, similar, why
        self.actions: Sequence[str] = ()
        self._grid = box("ol", "cards", aria_label="Items, best first")
        self._empty = text("p", "Nothing is left to answer: take a filter away.", "hint")
        self._empty.set_visibility(False)
        self._cards: dict[str, _Card] = {}
        self._titles: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._cards)

    def title_of(self, item_id: str) -> str:
        """Return the title of an item that is or was on a card; else the id."""
        return self._titles.get(item_id) or item_id

    def clear(self) -> None:
        """Remove all cards, because their links contain the user's id."""
        self._cards.clear()
        self._grid.clear()

    def set_read_only(self, is_read_only: bool) -> None:
        """Hide or show the buttons that write events."""
        self._grid.classes(**{"add" if is_read_only else "remove": "read-only"})

    def show(self, items: Sequence[ScoredItem], *, moves: bool) -> None:
        """Show these items in this order. moves: show how far each card moved."""
        for item_id in self._cards.keys() - {item.item_id for item in items}:
            self._cards.pop(item_id).element.delete()
        before = dict(self._cards)
        for place, item in enumerate(items, 1):
            card = before.get(item.item_id) or self._make(item)
            up, label, kind = card.place - place if card.place else 0, "", ""
            if moves and before and item.item_id not in before:
                label, kind = "new", "new"
            elif moves and up:
                label, kind = (f"▲ {up}", "up") if up > 0 else (f"▼ {-up}", "down")
            card.move.set_text(label)
            card.move.classes(replace=f"move {kind}")
            card.put(item, place)
        self._grid.default_slot.children[:] = [self._cards[item.item_id].element for item in items]
        self._grid.update()
        self._empty.set_visibility(not items)

    def add(self, items: Sequence[ScoredItem]) -> None:
        """Add these items after the shown ones."""
        for item in items:
            if item.item_id not in self._cards:
                self._make(item).put(item, len(self._cards))

    def _make(self, item: ScoredItem) -> _Card:
        self._titles[item.item_id] = item.title
        name, why = item.title or item.item_id, self._why(item.item_id)
        hue = zlib.crc32(",".join(item.categories or [item.item_id]).encode()) % 360
        with self._grid, box("li", "card", data_item=item.item_id).style(f"--hue: {hue}") as element:
            with box("div", "card-top"):
                rank, move = text("span", "", "rank"), text("span", "", "move")
                score = text("span", "", "score", title="Score: similarity of user and item, and votes of neighbours")
            text("h3", name, "isolated title")
            with box("p", "tags"):
                for category in item.categories[:4]:
                    text("span", category, "tag isolated")
                if found_by := SOURCES.get(item.source, item.source):
                    text("span", found_by, "tag why")
            with box("div", "acts"):
                for kind in self.actions:
                    act = partial(self._act, item, kind)
                    button("", act, icon=EVENT_ICONS[kind], classes=f"act {kind}", about=f"{kind.capitalize()}: {name}")
                similar = partial(self._similar, item.item_id)
                button("", similar, icon="join_inner", classes="act", about=f"Similar: {name}")
                with box("a", "act", aria_label=f"Why: {name}", title=f"Why: {name}", href=why):
                    ui.icon("help_outline").props("aria-hidden=true")
        self._cards[item.item_id] = card = _Card(element, rank, move, score)
        return card
