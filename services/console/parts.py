"""The parts of the page `Try it` other than the cards: user, filters, actions and headline; calls to copy."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from freshet_client import CatalogueDescription
from nicegui import ui
from nicegui.element import Element

from services.console.frame import Visit, box, button, entry, fill, text
from services.console.snippets import curl, python
from services.console.wanted import Wanted

MAX_CHIPS, MAX_DONE = 16, 8
ICONS = {"like": "thumb_up", "dislike": "thumb_down", "hide": "visibility_off"}
_DONE = {"undo": "The undo", "like": "The like", "dislike": "The dislike", "hide": "The hiding"}


class Who:
    """The panel that chooses the user. become: changes to a user id ("": a visitor). invent: changes to a new user."""

    def __init__(
        self, user_id: str, become: Callable[[str], Awaitable[None]], invent: Callable[[], Awaitable[None]]
    ) -> None:
        with box("section", "panel", aria_label="Who is looking"):
            text("h2", "Who is looking")
            self._field = entry("User id", become, value=user_id, hint="an id, then Enter")
            with box("div", "row"):
                button("Somebody new", invent, icon="person_add")
                button("A visitor", lambda: become(""), icon="no_accounts", about="A visitor without an id")
            self._said = text("p", self._sentence(user_id), "hint isolated")

    def say(self, user_id: str) -> None:
        """Show the new user."""
        self._said.set_text(self._sentence(user_id))
        fill(self._field, user_id)

    @staticmethod
    def _sentence(user_id: str) -> str:
        visitor = "Nothing is written of a visitor: what happens here stays in this tab."
        return f"You are {user_id}." if user_id else visitor


class Filters:
    """The panel of words and filters. search: called with the words. changed: called after any other change."""

    def __init__(
        self, wanted: Wanted, search: Callable[[str], Awaitable[None]], changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._wanted, self._search, self._changed = wanted, search, changed
        self._chips: dict[str, Element] = {}
        self._panel = box("section", "panel after", aria_label="What to answer")

    def show(self, catalogue: CatalogueDescription | None) -> None:
        """Show the fields, with the catalogue's categories. Call it once."""
        with self._panel:
            text("h2", "What to answer")
            hint = "find by words, then Enter"
            self._words = entry("Words", self._search, value=self._wanted.words, hint=hint, kind="search")
            self._categories(catalogue)
            self._range("At most of one category", "per_category", "5", "1", "0 is no limit")
            self._range("Variety", "variety", "0.9", "0.1", "0 orders by score alone")

    def clear_words(self) -> None:
        """Empty the words: the list is no longer a search result."""
        fill(self._words, "")

    def _categories(self, catalogue: CatalogueDescription | None) -> None:
        found = catalogue.categories[:MAX_CHIPS] if catalogue else ()
        if found:
            text("p", "Only these categories", "field-name")
        self._box = box("div", "chips")
        for one in found:
            self._add_chip(one.name, f"{one.items:,}")
        for name in self._wanted.categories:
            if name not in self._chips:
                self._add_chip(name, "")
        if catalogue is not None and catalogue.num_categories > MAX_CHIPS:
            entry(f"Another of {catalogue.num_categories:,} categories", self._toggle, hint="its name, then Enter")

    def _add_chip(self, name: str, count: str) -> None:
        is_on = str(name in self._wanted.categories).lower()
        with self._box:
            chip = self._chips[name] = box("button", "chip", type="button", aria_pressed=is_on)
            with chip:
                text("span", name, "isolated")
                text("span", count, "count")
        chip.on("click", lambda: self._toggle(name))

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

        slider.on("change", lambda event: moved(str(event.args)), js_handler="(e) => emit(e.target.value)")


class Done:
    """The panel of this tab's actions, newest first. undo: takes an event id, and a function to call after the undo."""

    def __init__(self, undo: Callable[[str, Callable[[], None]], Awaitable[None]]) -> None:
        self._undo = undo
        with box("section", "panel after", aria_label="What this person did here"):
            text("h2", "Done here")
            self._lines = box("ol", "done")
            self._nothing = text("p", "Nothing yet: like a card.", "hint")

    def clear(self) -> None:
        """Remove all actions, for a new user."""
        self._lines.clear()
        self._nothing.set_visibility(True)

    def add(self, kind: str, name: str, event_id: str) -> None:
        """Add an action. It can be undone if it has an event id."""
        self._nothing.set_visibility(False)
        with self._lines:
            line = box("li", "did")
            with line:
                ui.icon(ICONS.get(kind, "done")).props("aria-hidden=true")
                text("span", name, "isolated")
                if event_id:
                    undo = self._undo
                    button("Undo", lambda: undo(event_id, line.delete), classes="button quiet", about=f"Undo: {name}")
        line.move(target_index=0)
        for old in self._lines.default_slot.children[MAX_DONE:]:
            old.delete()


class Headline:
    """What the cards are, and how soon they reflected the last action."""

    def __init__(self) -> None:
        with box("div", "said"):
            self._moment = text("p", "", "moment", role="status")
            self._moment.set_visibility(False)
            self._what = text("h2", "", "isolated")
            self._about = text("p", "", "hint")

    def name(self, wanted: Wanted, like: str) -> None:
        """Set the title. like: the title of the item that the others are similar to."""
        if wanted.words:
            self._what.set_text(f"Found for “{wanted.words}”")
        elif wanted.like:
            self._what.set_text(f"Like {like}")
        else:
            self._what.set_text(f"For {wanted.user or 'a visitor'}")

    def say(self, about: str) -> None:
        """Show a sentence about the answer."""
        self._about.set_text(about)

    def forget_moment(self) -> None:
        """Hide the sentence about the last action."""
        self._moment.set_visibility(False)

    def say_moment(self, done: str, milliseconds: float, *, is_fresh: bool) -> None:
        """Show how soon the list reflected `done`: an event type, or "undo". is_fresh: the list reflects it."""
        name = _DONE.get(done, done)
        late = f"{name} is written, and this list does not reflect it yet."
        self._moment.set_text(f"{name} is in this list, {milliseconds:,.0f} ms later." if is_fresh else late)
        self._moment.set_visibility(True)
        self._moment.classes(replace="moment" if is_fresh else "moment late")


def code_of(visit: Visit, method: str, call: str, request: Any, arguments: Any, about: str) -> None:
    """Show a call as curl and Python. request: in Protobuf's JSON. arguments: of the client's method."""
    settings = visit.settings
    text("summary", f"{about} as curl and Python")
    snippet("curl", curl(settings.gateway_http, method, request, with_key=visit.has_key))
    snippet("Python", python(settings.gateway, call, arguments, with_key=visit.has_key))


def snippet(name: str, code: str) -> Element:
    """Code with a button that copies it."""
    with box("div", "snippet") as made:
        text("pre", code, tabindex="0")
        copy = button("Copy", lambda: None, icon="content_copy", about=f"Copy as {name}")
        copy.on("click", js_handler=f"(e) => freshet.copy(e, {json.dumps(code)})")
    return made
