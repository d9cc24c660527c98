"""What all pages share: header, elements with their own tags, links, and messages of failed calls.

Texts of items and users are set as text, never as HTML, and are isolated, so that no control character turns the line.
"""

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request
from freshet_client import AsyncClient, Conflict, FreshetError, PermissionDenied, Unauthenticated, Unreachable
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement
from starlette.datastructures import QueryParams

from services.console.access import SIGN_IN, UNKNOWN_KEY, Access
from services.console.config import ConsoleSettings

# Path -> name and lead, in the order of the header.
PAGES = {
    "/": ("Try it", "Be somebody, like something, and watch the list follow."),
    "/user": ("User", "What is stored of somebody, and what they get now."),
    "/why": ("Why", "Why somebody gets an item, or does not."),
    "/items": ("Items", "What the catalogue has, and what people see of it."),
    "/live": ("Live", "Events as they come, and how soon they count."),
    "/models": ("Models", "Which model answers whom. A new one is tried beside the old one first."),
    "/rules": ("Rules", "What every answer follows beside the model: boosts, buries, pins and caps."),
    "/health": ("Health", "What is wrong, and what to do about it."),
    "/experiments": ("Experiments", "Give arms to shares of your users, and see what each arm answers."),
    "/results": ("Results", "Which arm people like better, and how certain that is."),
}
E = TypeVar("E", bound=Element)
Handler = Callable[[], Awaitable[None] | None]


def text(tag: str, value: str, classes: str = "", **attributes: str) -> TextElement:
    return _with(TextElement(tag=tag, text=value), classes, attributes)


def box(tag: str = "div", classes: str = "", **attributes: str) -> Element:
    """Make an element, as a context manager of what it contains."""
    return _with(ui.element(tag), classes, attributes)


def _with(made: E, classes: str, attributes: dict[str, str]) -> E:
    made.classes(classes)
    made.props.update({name.replace("_", "-"): one for name, one in attributes.items()})
    return made


def panel(title: str, label: str = "", classes: str = "panel") -> Element:
    """Make a section with a heading. label: its name for screen readers, if not the title."""
    with box("section", classes, aria_label=label or title) as made:
        text("h2", title, "isolated")
    return made


def button(label: str, act: Handler, *, icon: str = "", classes: str = "button", about: str = "") -> Element:
    """Make a button. about: what screen readers read instead of the label; also shown on hovering."""
    made = box("button", classes, type="button", **({"aria_label": about, "title": about} if about else {}))
    with made:
        if icon:
            ui.icon(icon).props("aria-hidden=true")
        if label:
            text("span", label)
    return made.on("click", lambda: act())


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
    return made.on("keydown.enter", lambda event: act(str(event.args or "")), js_handler="(e) => emit(e.target.value)")


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
    return made.on("change", lambda event: act(str(event.args)), js_handler="(e) => emit(e.target.value)")


async def typed(*fields: Element) -> list[str]:
    """Return the fields' texts."""
    found = await ui.run_javascript(f"{[one.id for one in fields]}.map((id) => getElement(id).value)")
    return [str(one) for one in found]


def in_script(value: object) -> str:
    """A value as it stands in a script of the page; "</" would end the script."""
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


class Line:
    """A line that is hidden while it is empty."""

    def __init__(self, classes: str = "moment", role: str = "status") -> None:
        self._line = text("p", "", classes, role=role)
        self.say("")

    def say(self, what: str, classes: str = "") -> None:
        """Show a message; "" hides the line."""
        self._line.set_text(what)
        self._line.set_visibility(bool(what))
        if classes:
            self._line.classes(replace=classes)


class Notice(Line):
    """The line that shows the last failure."""

    def __init__(self) -> None:
        super().__init__("notice", "alert")

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Show the gateway's errors raised inside the block; the page stays as it was."""
        try:
            yield
        except Unauthenticated:
            ui.navigate.to("/sign-in")
        except PermissionDenied as error:
            self.say(f"Your key may not do that: {error}")
        except Unreachable as error:
            self.say(f"The gateway does not answer. {error} The page works again when it does.")
        except Conflict as error:
            self.say(f"Somebody else changed this meanwhile: nothing is saved. Open the page again. {error}")
        except FreshetError as error:
            self.say(str(error))
        else:
            self.say("")


@dataclass(frozen=True, slots=True)
class Visit:
    """One opened page. query: its address's fields. roles: of the browser's key, None if unknown."""

    client: AsyncClient
    settings: ConsoleSettings
    query: QueryParams
    notice: Notice
    has_key: bool
    roles: frozenset[str] | None

    def has(self, *roles: str) -> bool:
        """Return whether the key may have one of these roles."""
        return self.roles is None or not self.roles.isdisjoint(roles)

    def may(self, role: str) -> bool:
        """As `has`; if not, show that this part of the page is read-only."""
        if not self.has(role):
            text("p", f"Read-only: your key lacks the role {role}.", "hint")
        return self.has(role)


def add_page(access: Access, path: str, make: Callable[[Visit], Any]) -> None:
    """Add a page. make: returns one tab's content; its `begin` asks the gateway, and its failures are shown."""

    @ui.page(path)
    async def page(request: Request) -> None:
        with page_frame(access, path, *PAGES[path]):
            notice = Notice()
            why, roles = await access.admit()
            if why in (SIGN_IN, UNKNOWN_KEY):
                ui.navigate.to("/sign-in")
            elif why:
                notice.say(why)
            else:
                query, has_key = request.query_params, access.is_signed_in
                shown = make(Visit(access.client, access.settings, query, notice, has_key, roles))
                with notice.failures():
                    await shown.begin()


def page_frame(access: Access, path: str, title: str, lead: str) -> Element:
    """Make the header; return the main part, as a context manager."""
    ui.page_title(f"{title} · Freshet")
    ui.add_head_html('<link rel="stylesheet" href="/static/console.css"><script src="/static/console.js"></script>')
    ui.query(".nicegui-content").classes("page")
    text("a", "Skip to content", "skip", href="#main")
    with box("header", "top"):
        with box("a", "brand", href="/", aria_label="Freshet, start page"):
            box("img", "drop", src="/static/drop.svg", alt="", width="26", height="26")
            text("span", "Freshet")
        with box("nav", "tabs", aria_label="Pages"):
            for target, (name, _) in PAGES.items():
                text("a", name, "tab", href=target, **({"aria_current": "page"} if target == path else {}))
        if access.is_signed_in:
            button("Sign out", lambda: _sign_out(access), classes="button quiet")
    # A <div>, because NiceGUI already makes the page a <main>.
    with box("div", "main", id="main", tabindex="-1") as main:
        text("h1", title)
        text("p", lead, "lead")
    return main


def _sign_out(access: Access) -> None:
    access.sign_out()
    ui.navigate.to("/sign-in")
