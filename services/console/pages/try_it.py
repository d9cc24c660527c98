"""Try it: a user's list as cards. The user's actions change the list, and the page shows the delay."""

import secrets
import time
from collections.abc import Awaitable, Callable

from freshet_client import ScoredItem
from nicegui import ui

from services.console.access import LOOK
from services.console.cards import ICONS, Cards, Shown
from services.console.frame import Line, Visit, box, button, entry, fill, in_script, link, panel, text
from services.console.sentences import about_answer
from services.console.snippets import code_of
from services.console.wanted import Filters, Wanted, call_of

PAGE, MOST, MAX_CATEGORIES, MAX_DONE = 12, 96, 200, 8
# Labels of the sources that proposed an item (none for the model alone), and of those that found it by words.
SOURCES = {"mol": "", "first_stage": "first stage"}
FOUND_BY = {"text_mol": "meaning", "lexical": "words", "mol": "taste"}
DONE = {"undo": "The undo", "like": "The like", "dislike": "The dislike", "hide": "The hiding"}


class TryIt:
    """One tab's page. One call runs at a time: a click during a call does nothing."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._wanted, self._is_busy = visit, Wanted.of(visit.query), False
        self._session = visit.client.session(self._wanted.user)
        self._may_write = visit.may("ingest")
        with box("div", "columns"):
            with box("div", "side"):
                with panel("Who is looking"):
                    self._user = entry("User id", self._become, value=self._wanted.user, hint="an id, then Enter")
                    with box("div", "row"):
                        button("Somebody new", self._invent, icon="person_add")
                        button(
                            "A visitor", lambda: self._become(""), icon="no_accounts", about="A visitor without an id"
                        )
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
                self._code = box("details", "code")
        self._more.set_visibility(False)

    async def begin(self) -> None:
        with self._visit.notice.failures():
            catalogue = await self._visit.client.catalogue(max_categories=MAX_CATEGORIES)
            known = {one.type for one in catalogue.event_types}
            self._cards.actions = [kind for kind in ICONS if kind in known]
            self._filters.show(catalogue)
        self._say_who()
        await self._show()

    def _say_who(self) -> None:
        visitor = "Nothing is written of a visitor: what happens here stays in this tab."
        self._who.set_text(f"You are {self._wanted.user}." if self._wanted.user else visitor)

    async def _become(self, user_id: str) -> None:
        self._wanted.user = user_id.strip()
        self._session = self._visit.client.session(self._wanted.user)
        self._cards.clear()
        self._done.clear()
        self._nothing.set_visibility(True)
        self._moment.say("")
        self._say_who()
        fill(self._user, self._wanted.user)
        await self._show(is_new=True)

    async def _invent(self) -> None:
        await self._become(f"guest-{secrets.token_hex(3)}")

    async def _search(self, words: str) -> None:
        self._wanted.words, self._wanted.like = words.strip(), ""
        await self._show(is_new=True)

    async def _similar(self, item_id: str) -> None:
        self._wanted.words, self._wanted.like = "", item_id
        self._filters.clear_words()
        await self._show(is_new=True)

    def _why(self, item_id: str) -> str:
        return link("/why", user=self._session.user_id, item=item_id)

    async def _act(self, item: Shown, kind: str) -> None:
        """Record the action, then show the list that reflects it."""
        began = time.perf_counter()

        async def record() -> None:
            receipt = await self._session.record(item.item_id, kind)
            self._add_done(kind, item.title or item.item_id, "" if receipt is None else receipt.event_id)

        if await self._alone(record):
            await self._show(since=began, done=kind)

    def _add_done(self, kind: str, name: str, event_id: str) -> None:
        self._nothing.set_visibility(False)
        with self._done, box("li", "did") as line:
            ui.icon(ICONS[kind]).props("aria-hidden=true")
            text("span", name, "isolated")
            if event_id:
                undo = self._undo
                button("Undo", lambda: undo(event_id, line.delete), classes="button quiet", about=f"Undo: {name}")
        line.move(target_index=0)
        for old in self._done.default_slot.children[MAX_DONE:]:
            old.delete()

    async def _undo(self, event_id: str, gone: Callable[[], None]) -> None:
        began = time.perf_counter()

        async def undo() -> None:
            await self._session.undo(event_id)

        if await self._alone(undo):
            await self._show(since=began, done="undo")
            gone()

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
        ui.run_javascript(f"freshet.address({in_script(wanted.address)})")
        await self._alone(ask)
        self._code.clear()
        with self._code:
            code_of(self._visit, "This list", *call_of(wanted, self._session, count))
        self._more.set_visibility(not (wanted.words or wanted.like) and self._session.has_next_page)

    async def _answer(self, count: int) -> tuple[list[Shown], str, bool]:
        """The items, a sentence about them, and whether they reflect what was done."""
        call, _, given = call_of(self._wanted, self._session, count)
        client = self._visit.client
        if call == "search":
            found = await client.search(**given, context=LOOK)
            names = [[FOUND_BY.get(rank.source, rank.source) for rank in one.found_by] for one in found.results]
            items = [
                Shown(one.item_id, one.title, score=one.score, why=", ".join(by))
                for one, by in zip(found.results, names, strict=True)
            ]
            return items, about_answer(len(items), found.degradations, None, found.total_ms), True
        if call == "similar":
            near = await client.similar(**given, context=LOOK)
            items = [Shown(one.item_id, one.title, score=one.similarity, why="similar") for one in near.items]
            return items, about_answer(len(items), near.degradations, near.certificate, near.total_ms), True
        del given["user_id"]
        answer = await self._session.recommend(**given, page_depth=MOST, context=LOOK)
        times = answer.provenance.stage_times
        milliseconds = times.total_ms if times else None
        about = about_answer(len(answer.items), answer.degradations, answer.certificate, milliseconds)
        return [_shown(one) for one in answer.items], about, answer.token_honoured

    async def _show_more(self) -> None:
        async def ask() -> None:
            page = await self._session.next_page()
            if page is not None:
                self._cards.add([_shown(one) for one in page.items])

        await self._alone(ask)
        self._more.set_visibility(self._session.has_next_page and len(self._cards) < MOST)

    async def _alone(self, act: Callable[[], Awaitable[None]]) -> bool:
        """Run `act` unless a call runs. Return whether it succeeded."""
        if self._is_busy:
            return False
        self._is_busy, worked = True, False
        try:
            with self._visit.notice.failures():
                await act()
                worked = True
        finally:
            self._is_busy = False
        return worked


def _shown(one: ScoredItem) -> Shown:
    return Shown(one.item_id, one.title, one.categories, one.score, SOURCES.get(one.source, one.source))
