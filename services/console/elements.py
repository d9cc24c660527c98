"""Elements with their own tags, fields, links and lists.

Texts of items and users are set as text, never as HTML, and are isolated, so that no control character reverses a line.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import isawaitable
from typing import Any, TypeVar
from urllib.parse import urlencode

from freshet_client import Recommendation, ScoredItem
from nicegui import app, ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

E = TypeVar("E", bound=Element)


def text(tag: str, value: str, classes: str = "", **attributes: str) -> TextElement:
    return _with(TextElement(tag=tag, text=value), classes, attributes)


def box(tag: str = "div", classes: str = "", **attributes: str) -> Element:
    """Make an element that is a context manager for its contents."""
    return _with(ui.element(tag), classes, attributes)


def _with(made: E, classes: str, attributes: dict[str, str]) -> E:
    made.classes(classes)
    made.props.update({name.replace("_", "-"): one for name, one in attributes.items()})
    return made


@contextlib.contextmanager
def refill(element: Element) -> Iterator[None]:
    """Empty an element, and fill it inside the block."""
    element.clear()
    with element:
        yield


def texts(values: Iterable[str], classes: str = "isolated") -> None:
    """Make a list of texts."""
    with box("ul", "plain"):
        for one in values:
            text("li", one, classes)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Make a table. The first cell of a row is its heading."""
    with box("table", "numbers"), box("tbody"):
        for place, (first, *others) in enumerate((heads, *rows)):
            with box("tr"):
                text("th", first, scope="row" if place else "col")
                for one in others:
                    text("td", one) if place else text("th", one, scope="col")


def panel(title: str, label: str = "", classes: str = "panel") -> Element:
    """Make a section with a heading. label: its name for screen readers, if not the title."""
    with box("section", classes, aria_label=label or title) as made:
        text("h2", title, "isolated")
    return made


def folded(title: str) -> Element:
    """Make a part of the page that opens by a click on its title."""
    with box("details", "code") as made:
        text("summary", title)
    return made


def button(label: str, act: Callable[[], Any], *, icon: str = "", classes: str = "button", about: str = "") -> Element:
    """Make a button. about: what screen readers read instead of the label; also shown on hovering."""
    made = box("button", classes, type="button", **({"aria_label": about, "title": about} if about else {}))
    with made:
        if icon:
            ui.icon(icon).props("aria-hidden=true")
        if label:
            text("span", label)
    return made.on("click", lambda: handle(act))


async def handle(act: Callable[..., Any], *given: Any) -> None:
    """Run an element's action, and show a failure in the page's notice."""
    with app.storage.client["notice"].failures():
        if isawaitable(done := act(*given)):
            await done


@contextlib.contextmanager
def _field(label: str) -> Iterator[None]:
    with box("label", "field"):
        text("span", label, "field-name")
        yield


def entry(label: str, act: Callable[[str], Any], *, value: str = "", hint: str = "", kind: str = "text") -> Element:
    """Make a text field. act: called with the text on Enter. value: the first text."""
    with _field(label):
        made = box("input", "input", type=kind, placeholder=hint, autocomplete="off", spellcheck="false")
    # "^" sets the attribute. Vue sets the property `value` at each update, which would erase what somebody types.
    made.props["^value"] = value
    js = "(e) => emit(e.target.value)"
    return made.on("keydown.enter", lambda event: handle(act, str(event.args or "")), js_handler=js)


def area(label: str, value: str, rows: int = 16) -> Element:
    """Make a text field of several lines."""
    with _field(label):
        return text("textarea", value, "input", rows=str(rows), spellcheck="false")


def choice(label: str, options: Sequence[str], value: str, act: Callable[[str], Any], *, empty: str = "") -> Element:
    """Make a list of options. act: called with the chosen one. empty: label of the option ""."""
    with _field(label), box("select", "input") as made:
        for one in options:
            option = text("option", one or empty)
            option.props.update({"value": one} | ({"selected": True} if one == value else {}))
    return made.on("change", lambda event: handle(act, str(event.args)), js_handler="(e) => emit(e.target.value)")


async def typed(*fields: Element) -> list[str]:
    """Return the fields' texts."""
    return list(await ui.run_javascript(f"{[one.id for one in fields]}.map((id) => getElement(id).value)"))


def in_script(value: object) -> str:
    """Return a value as JavaScript. It escapes "</", which would end the script."""
    return json.dumps(value).replace("</", "<\\/")


def fill(field: Element, value: str) -> None:
    """Replace the text of an `entry`."""
    ui.run_javascript(f"getElement({field.id}).value = {in_script(value)}")


def link(path: str, **fields: str) -> str:
    """Return a page's address, without empty fields."""
    given = urlencode({name: value for name, value in fields.items() if value})
    return f"{path}?{given}" if given else path


def item_link(item: Any, path: str, **fields: str) -> None:
    """Make a link to a page about the item, named by its title or else its id."""
    text("a", item.title or item.item_id, "isolated", href=link(path, **fields, item=item.item_id))


def item_list(
    items: Iterable[Any], path: str, beside: Callable[[Any], tuple[str, str]] = lambda one: ("", ""), **fields: str
) -> None:
    """Make a list of links to a page about each item. beside: returns a text beside the link, and its classes."""
    with box("ol", "plain"):
        for one in items:
            with box("li", "pair"):
                item_link(one, path, **fields)
                if (note := beside(one))[0]:
                    text("span", *note)


def two_lists(title: str, user: str, before: tuple[str, Recommendation], after: tuple[str, Recommendation]) -> None:
    """Show two named answers to a user: which items one of them lacks, and how far an item moved."""
    ids, others = before[1].item_ids, after[1].item_ids

    def lacking(one: ScoredItem) -> tuple[str, str]:
        return "" if one.item_id in others else "only here", "tag why"

    def moved(one: ScoredItem) -> tuple[str, str]:
        if one.item_id not in ids:
            return "new", "move new"
        up = ids.index(one.item_id) - others.index(one.item_id)
        return f"{up:+d}" if up else "", f"move {'up' if up > 0 else 'down'}"

    with panel(user, title):
        text("p", before[0], "field-name")
        item_list(before[1].items, "/why", lacking, user=user)
        text("p", after[0], "field-name")
        item_list(after[1].items, "/why", moved, user=user)


async def confirmed(what: Sequence[str], do: str = "Do it") -> bool:
    """Show what a step does, in a dialog; return whether the user confirmed it. do: label of the button."""
    with ui.dialog() as dialog, box("div", "page panel"):
        text("h2", "Look again")
        for one in what:
            text("p", one, "isolated")
        with box("div", "row"):
            button(do, lambda: dialog.submit(True), classes="button danger")
            button("Not now", dialog.close)
    dialog.props.update({"aria-label": "Look again"})
    dialog.on("hide", dialog.delete)
    return bool(await dialog)


class Line:
    """A line that is hidden while it is empty."""

    def __init__(self, classes: str = "moment", role: str = "status") -> None:
        self._line, self._num_said = text("p", "", classes, role=role), 0
        self.say("")

    def say(self, what: str, classes: str = "") -> None:
        """Show a message; "" hides the line."""
        self._num_said += 1
        self._line.set_text(what)
        self._line.set_visibility(bool(what))
        if classes:
            self._line.classes(replace=classes)
