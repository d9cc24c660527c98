"""Try it: a user's list as cards. The user's actions change the list, and the page shows the delay."""

import secrets
import time
from collections.abc import Awaitable, Callable

from freshet_client import ScoredItem, SearchResult
from nicegui import ui

from services.console.access import LOOK, Access
from services.console.cards import Cards, Shown
from services.console.frame import Visit, add_page, box, button
from services.console.links import why_link
from services.console.parts import ICONS, Done, Filters, Headline, Who, code_of
from services.console.sentences import about_answer
from services.console.snippets import in_script
from services.console.wanted import Wanted, call_of

PATH = "/"
PAGE, MOST, MAX_CATEGORIES = 12, 96, 200
# Labels of the sources that proposed an item (none for the model alone), and of those that found it by words.
SOURCES = {"mol": "", "first_stage": "first stage"}
FOUND_BY = {"text_mol": "meaning", "lexical": "words", "mol": "taste"}


def add(access: Access) -> None:
    """Add the page."""

    lead = "Be somebody, like something, and watch the list follow."
    add_page(access, PATH, "Try it", lead, lambda visit: TryIt(visit).begin())


class TryIt:
    """One tab's page. One call runs at a time: a click during a call does nothing."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self.wanted, self._is_busy = visit, Wanted.of(visit.query), False
        self._session = visit.client.session(self.wanted.user)
        self._may_write = visit.may("ingest")
        with box("div", "columns"):
            with box("div", "side"):
                self._who = Who(self.wanted.user, self._become, self._invent)
                self._done = Done(self._undo)
                self._filters = Filters(self.wanted, self._search, self._show)
            with box("div", "wide"):
                self._head = Headline()
                self._cards = Cards(self._act, self._similar)
                self._cards.why = lambda item_id: why_link(self._session.user_id, item_id)
                with box("div", "row"):
                    self._more = button("Show more", self._show_more, icon="expand_more")
                    self._more.set_visibility(False)
                self._code = box("details", "code")

    async def begin(self) -> None:
        """Show the first list."""
        with self._visit.notice.failures():
            catalogue = await self._visit.client.catalogue(max_categories=MAX_CATEGORIES)
            known = {one.type for one in catalogue.event_types}
            self._cards.actions = [(kind, ICONS[kind]) for kind in ICONS if kind in known]
            self._filters.show(catalogue)
        await self._show()

    async def _become(self, user_id: str) -> None:
        self.wanted.user = user_id.strip()
        self._session = self._visit.client.session(self.wanted.user)
        self._done.clear()
        self._head.forget_moment()
        self._who.say(self.wanted.user)
        await self._show(is_new=True)

    async def _invent(self) -> None:
        await self._become(f"guest-{secrets.token_hex(3)}")

    async def _search(self, words: str) -> None:
        self.wanted.words, self.wanted.like = words.strip(), ""
        await self._show(is_new=True)

    async def _similar(self, item_id: str) -> None:
        self.wanted.words, self.wanted.like = "", item_id
        self._filters.clear_words()
        await self._show(is_new=True)

    async def _act(self, item: Shown, kind: str) -> None:
        """Record the action, then show the list that reflects it."""
        began = time.perf_counter()

        async def record() -> None:
            receipt = await self._session.record(item.item_id, kind)
            self._done.add(kind, item.title or item.item_id, "" if receipt is None else receipt.event_id)

        if await self._alone(record):
            await self._show(since=began, done=kind)

    async def _undo(self, event_id: str, gone: Callable[[], None]) -> None:
        began = time.perf_counter()

        async def undo() -> None:
            await self._session.undo(event_id)

        if await self._alone(undo):
            await self._show(since=began, done="undo")
            gone()

    async def _show(self, *, is_new: bool = False, since: float = 0.0, done: str = "") -> None:
        """Fetch the list again, with as many cards as are shown. since: `time.perf_counter()` at the user's action."""
        count = PAGE if is_new else max(PAGE, min(MOST, len(self._cards)))

        async def ask() -> None:
            items, about, is_fresh = await self._answer(count)
            if since:
                self._head.say_moment(done, 1000 * (time.perf_counter() - since), is_fresh=is_fresh)
            self._cards.show(items, moves=not is_new)
            self._head.say(about)

        # A visitor's events stay in this tab.
        self._cards.set_read_only(bool(self.wanted.user) and not self._may_write)
        self._head.name(self.wanted, self._cards.title_of(self.wanted.like))
        ui.run_javascript(f"freshet.address({in_script(self.wanted.address)})")
        await self._alone(ask)
        self._code.clear()
        with self._code:
            code_of(self._visit, *call_of(self.wanted, self._session, count), about="This list")
        is_list = not (self.wanted.words or self.wanted.like)
        self._more.set_visibility(is_list and self._session.has_next_page)

    async def _answer(self, count: int) -> tuple[list[Shown], str, bool]:
        """The items, a sentence about them, and whether they reflect what was done."""
        wanted, client = self.wanted, self._visit.client
        if wanted.words:
            found = await client.search(wanted.words, count, user_id=wanted.user, filter=wanted.filter, context=LOOK)
            items = [Shown(one.item_id, one.title, score=one.score, why=_found_by(one)) for one in found.results]
            return items, about_answer(len(items), found.degradations, None, found.total_ms), True
        if wanted.like:
            near = await client.similar(wanted.like, count, user_id=wanted.user, filter=wanted.filter, context=LOOK)
            items = [Shown(one.item_id, one.title, score=one.similarity, why="similar") for one in near.items]
            return items, about_answer(len(items), near.degradations, near.certificate, near.total_ms), True
        answer = await self._session.recommend(
            k=count,
            page_depth=MOST,
            filter=wanted.filter,
            max_per_category=wanted.per_category,
            diversity=wanted.variety,
            with_details=True,
            context=LOOK,
        )
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


def _found_by(one: SearchResult) -> str:
    return ", ".join(FOUND_BY.get(rank.source, rank.source) for rank in one.found_by)
