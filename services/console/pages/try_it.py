"""Try it: a user's list as cards. The user's actions change the list, and the page shows the delay.

`Wanted` is what the page asks for; `call_of` turns it into a call, and `Filters` is the panel that changes it.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from freshet.v1 import gateway_pb2
from freshet_client import AsyncSession, CatalogueDescription, Filter, ScoredItem, SearchResult
from nicegui import ui
from nicegui.element import Element
from starlette.datastructures import QueryParams

from services.console.access import LOOK
from services.console.cards import EVENT_ICONS, Cards
from services.console.elements import Line, box, button, entry, fill, folded, handle, link, panel, refill, text
from services.console.frame import Page
from services.console.sentences import about_answer
from services.console.snippets import code_of

PAGE, MOST, MAX_CATEGORIES, MAX_DONE, MAX_CHIPS = 12, 96, 200, 8, 16
# Labels of the sources that find an item by words.
FOUND_BY = {"text_mol": "meaning", "lexical": "words", "mol": "taste"}
DONE = {"undo": "The undo", "like": "The like", "dislike": "The dislike", "hide": "The hiding"}


@dataclass
class Wanted:
    """What the page asks for, as its address says. If both `words` and `like` are set, `words` counts."""

    user: str = ""
    categories: list[str] = field(default_factory=list)
    words: str = ""
    like: str = ""
    per_category: int = 0
    variety: float = 0.0

    @property
    def filter(self) -> Filter | None:
        return Filter(allow_categories=self.categories) if self.categories else None

    @property
    def address(self) -> list[tuple[str, str]]:
        """The fields that are set, for the address bar."""
        fields = [("user", self.user), ("words", self.words), ("like", self.like)]
        fields += [("category", name) for name in self.categories]
        fields += [("per_category", str(self.per_category or "")), ("variety", str(self.variety or ""))]
        return [(name, value) for name, value in fields if value]

    @classmethod
    def of(cls, asked: QueryParams) -> "Wanted":
        """Read the address. Fields that cannot be parsed are ignored."""
        per_category, variety = asked.get("per_category", ""), asked.get("variety", "")
        return cls(
            user=asked.get("user", ""),
            categories=asked.getlist("category"),
            words=asked.get("words", ""),
            like=asked.get("like", ""),
            per_category=min(int(per_category), 10) if per_category.isdecimal() else 0,
            variety=min(float(variety), 1.0) if variety.replace(".", "", 1).isdecimal() else 0.0,
        )


def call_of(wanted: Wanted, session: AsyncSession, count: int) -> tuple[str, Any, dict[str, Any]]:
    """Return the client's method, an empty request of the gateway's method, and the arguments."""
    given: dict[str, Any] = {"k": count, "user_id": session.user_id, "filter": wanted.filter}
    if wanted.words or wanted.like:
        given["user_id"] = "" if session.is_visitor else session.user_id
    if wanted.words:
        return "search", gateway_pb2.GatewayServiceSearchRequest(), {"query": wanted.words} | given
    if wanted.like:
        return "similar", gateway_pb2.GatewayServiceSimilarRequest(), {"item_id": wanted.like} | given
    given |= {"max_per_category": wanted.per_category, "diversity": wanted.variety, "with_details": True}
    return "recommend", gateway_pb2.RecommendRequest(), given


class Filters:
    """The panel of words and filters. search: called with the words. changed: called after any other change."""

    def __init__(
        self, wanted: Wanted, search: Callable[[str], Awaitable[None]], changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._wanted, self._search, self._changed = wanted, search, changed
        self._chips: dict[str, Element] = {}
        self._panel = panel("What to answer", classes="panel after")

    def show(self, catalogue: CatalogueDescription) -> None:
        """Show the fields, with the catalogue's categories. Call it once."""
        with self._panel:
            hint = "find by words, then Enter"
            self._words = entry("Words", self._search, value=self._wanted.words, hint=hint, kind="search")
            if catalogue.categories:
                text("p", "Only these categories", "field-name")
            self._box = box("div", "chips")
            for one in catalogue.categories[:MAX_CHIPS]:
                self._add_chip(one.name, f"{one.items:,}")
            for name in self._wanted.categories:
                if name not in self._chips:
                    self._add_chip(name, "")
            if catalogue.num_categories > MAX_CHIPS:
                entry(f"Another of {catalogue.num_categories:,} categories", self._toggle, hint="its name, then Enter")
            self._range("At most of one category", "per_category", "5", "1", "0 is no limit")
            self._range("Variety", "variety", "0.9", "0.1", "0 orders by score alone")

    def clear_words(self) -> None:
        """Empty the words: the list is no longer a search result."""
        fill(self._words, "")

    def _add_chip(self, name: str, count: str) -> None:
        is_on = str(name in self._wanted.categories).lower()
        with self._box, box("button", "chip", type="button", aria_pressed=is_on) as chip:
            text("span", name, "isolated")
            text("span", count, "count")
        self._chips[name] = chip.on("click", lambda: handle(self._toggle, name))

    async def _toggle(self, name: str) -> None:
        chosen, name = self._wanted.categories, name.strip()
        if not name:
            return
        if name in chosen:
            chosen.remove(name)
        else:
            chosen.append(name)
        if name not in self._chips:
            self._add_chip(name, "")
        self._chips[name].props["aria-pressed"] = str(name in chosen).lower()
        self._chips[name].update()
        await self._changed()

    def _range(self, label: str, name: str, most: str, step: str, hint: str) -> None:
        value = str(getattr(self._wanted, name))
        with box("label", "field"):
            with box("span", "field-name"):
                text("span", label)
                shown = text("span", value)
            slider = box("input", "range", type="range", min="0", max=most, step=step, title=hint)
            slider.props["^value"] = value  # See `entry`.

        async def moved(value: str) -> None:
            setattr(self._wanted, name, int(value) if step == "1" else float(value))
            shown.set_text(value)
            await self._changed()

        js = "(e) => emit(e.target.value)"
        slider.on("change", lambda event: handle(moved, str(event.args)), js_handler=js)


class TryIt(Page):
    """One tab's page. One call runs at a time: a click during a call does nothing."""

    async def show(self) -> None:
        self._wanted, self._is_busy = Wanted.of(self.query), False
        self._session = self.client.session(self._wanted.user)
        self._may_write = self.may("ingest")
        with box("div", "columns"):
            with box("div", "side"):
                with panel("Who is looking"):
                    self._user = entry("User id", self._become, value=self._wanted.user, hint="an id, then Enter")
                    with box("div", "row"):
                        button("Somebody new", lambda: self._become(f"guest-{secrets.token_hex(3)}"), icon="person_add")
                        visitor = "A visitor without an id"
                        button("A visitor", lambda: self._become(""), icon="no_accounts", about=visitor)
                    self._who = text("p", "", "hint isolated")
                with panel("Done here", "What this person did here", "panel after"):
                    self._done = box("ol", "done")
                    self._nothing = text("p", "Nothing yet: like a card.", "hint")
                self._filters = Filters(self._wanted, self._search, self._show)
            with box("div", "wide"):
                with box("div", "said"):
                    self._moment = Line()
                    self._what = text("h2", "", "isolated")
                    self._about = text("p", "", "hint")
                self._cards = Cards(self._act, self._similar, self._why)
                with box("div", "row"):
                    self._more = button("Show more", self._show_more, icon="expand_more")
                with folded("This list as curl and Python"):
                    self._code = box()
        self._more.set_visibility(False)
        await handle(self._show_filters)
        self._say_who()
        await self._show()

    async def _show_filters(self) -> None:
        catalogue = await self.client.catalogue(max_categories=MAX_CATEGORIES)
        known = {one.type for one in catalogue.event_types}
        self._cards.actions = [kind for kind in EVENT_ICONS if kind in known]
        self._filters.show(catalogue)

    def _say_who(self) -> None:
        visitor = "Nothing is written of a visitor: what happens here stays in this tab."
        self._who.set_text(f"You are {self._wanted.user}." if self._wanted.user else visitor)

    async def _become(self, user_id: str) -> None:
        self._wanted.user = user_id.strip()
        self._session = self.client.session(self._wanted.user)
        self._cards.clear()
        self._done.clear()
        self._nothing.set_visibility(True)
        self._moment.say("")
        self._say_who()
        fill(self._user, self._wanted.user)
        await self._show(is_new=True)

    async def _search(self, words: str) -> None:
        self._wanted.words, self._wanted.like = words.strip(), ""
        await self._show(is_new=True)

    async def _similar(self, item_id: str) -> None:
        self._wanted.words, self._wanted.like = "", item_id
        self._filters.clear_words()
        await self._show(is_new=True)

    def _why(self, item_id: str) -> str:
        return link("/why", user=self._session.user_id, item=item_id)

    async def _act(self, item: ScoredItem, kind: str) -> None:
        async def record() -> None:
            receipt = await self._session.record(item.item_id, kind)
            self._add_done(kind, item.title or item.item_id, "" if receipt is None else receipt.event_id)

        await self._do(record, kind)

    async def _do(self, act: Callable[[], Awaitable[Any]], done: str) -> bool:
        """Run the user's action, then show the list that reflects it. Return whether the action ran."""
        began = time.perf_counter()
        worked = await self._alone(act)
        if worked:
            # The action is done even if the list cannot be shown.
            await handle(partial(self._show, since=began, done=done))
        return worked

    def _add_done(self, kind: str, name: str, event_id: str) -> None:
        session = self._session

        async def undo() -> None:
            if await self._do(partial(session.undo, event_id), "undo"):
                line.delete()

        self._nothing.set_visibility(False)
        with self._done, box("li", "did") as line:
            ui.icon(EVENT_ICONS[kind]).props("aria-hidden=true")
            text("span", name, "isolated")
            if event_id:
                button("Undo", undo, classes="button quiet", about=f"Undo: {name}")
        line.move(target_index=0)
        for old in self._done.default_slot.children[MAX_DONE:]:
            old.delete()

    async def _show(self, *, is_new: bool = False, since: float = 0.0, done: str = "") -> None:
        """Fetch the list again, with as many cards as are shown. since: `time.perf_counter()` at the user's action."""
        count, wanted = PAGE if is_new else max(PAGE, min(MOST, len(self._cards))), self._wanted

        async def ask() -> None:
            items, about, is_fresh = await self._answer(count)
            if since:
                late = f"{DONE[done]} is written, and this list does not reflect it yet."
                fresh = f"{DONE[done]} is in this list, {1000 * (time.perf_counter() - since):,.0f} ms later."
                self._moment.say(*((fresh, "moment") if is_fresh else (late, "moment late")))
            self._cards.show(items, moves=not is_new)
            self._about.set_text(about)

        # A visitor's events stay in this tab.
        self._cards.set_read_only(bool(wanted.user) and not self._may_write)
        title = f"Like {self._cards.title_of(wanted.like)}" if wanted.like else f"For {wanted.user or 'a visitor'}"
        self._what.set_text(f"Found for “{wanted.words}”" if wanted.words else title)
        self.show_address(wanted.address)
        with refill(self._code):
            code_of(self, *call_of(wanted, self._session, count))
        await self._alone(ask)
        self._more.set_visibility(not (wanted.words or wanted.like) and self._session.has_next_page)

    async def _answer(self, count: int) -> tuple[Sequence[ScoredItem], str, bool]:
        """The items, a sentence about them, and whether they reflect what was done."""
        call, _, given = call_of(self._wanted, self._session, count)
        client = self.client
        if call == "search":
            found = await client.search(**given, context=LOOK)
            items = [ScoredItem(one.item_id, one.score, _found_by(one), title=one.title) for one in found.results]
            return items, about_answer(len(items), found.degradations, None, found.total_ms), True
        if call == "similar":
            near = await client.similar(**given, context=LOOK)
            items = [ScoredItem(one.item_id, one.similarity, "similar", title=one.title) for one in near.items]
            return items, about_answer(len(items), near.degradations, near.certificate, near.total_ms), True
        del given["user_id"]
        answer = await self._session.recommend(**given, page_depth=MOST, context=LOOK)
        times = answer.provenance.stage_times
        milliseconds = times.total_ms if times else None
        about = about_answer(len(answer.items), answer.degradations, answer.certificate, milliseconds)
        return answer.items, about, answer.token_honoured

    async def _show_more(self) -> None:
        async def ask() -> None:
            page = await self._session.next_page()
            if page is not None:
                self._cards.add(page.items)

        await self._alone(ask)
        self._more.set_visibility(self._session.has_next_page and len(self._cards) < MOST)

    async def _alone(self, act: Callable[[], Awaitable[Any]]) -> bool:
        """Run `act` unless a call runs. Return whether `act` ran."""
        if self._is_busy:
            return False
        self._is_busy = True
        try:
            await act()
        finally:
            self._is_busy = False
        return True


def _found_by(one: SearchResult) -> str:
    return ", ".join(FOUND_BY.get(rank.source, rank.source) for rank in one.found_by)
