"""Code that all pages share: the header, texts and buttons with their own tags, and messages of failed calls.

Texts of items and users are set as text, never as HTML. They are isolated, so that no control character in them changes
the direction of the line.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from freshet_client import AsyncClient, FreshetError, PermissionDenied, Unauthenticated, Unreachable
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement
from starlette.datastructures import QueryParams

from services.console.access import SIGN_IN, UNKNOWN_KEY, Access
from services.console.config import ConsoleSettings
from services.console.snippets import in_script

# Path and name, in the order of the header.
PAGES = (
    ("/", "Try it"),
    ("/user", "User"),
    ("/why", "Why"),
    ("/items", "Items"),
    ("/live", "Live"),
    ("/models", "Models"),
    ("/rules", "Rules"),
    ("/health", "Health"),
    ("/experiments", "Experiments"),
    ("/results", "Results"),
)
Handler = Callable[[], Awaitable[None] | None]


def text(tag: str, value: str, classes: str = "", **attributes: str) -> TextElement:
    """Make an element with a text."""
    made = TextElement(tag=tag, text=value)
    if classes:
        made.classes(classes)
    made.props.update({name.replace("_", "-"): one for name, one in attributes.items()})
    return made


def box(tag: str = "div", classes: str = "", **attributes: str) -> Element:
    """Make an element that contains others; use it as a context manager."""
    made = ui.element(tag)
    if classes:
        made.classes(classes)
    made.props.update({name.replace("_", "-"): one for name, one in attributes.items()})
    return made


def button(label: str, act: Handler, *, icon: str = "", classes: str = "button", about: str = "") -> Element:
    """Make a button. about: text that screen readers read instead of the label, also shown on hovering."""
    made = box("button", classes, type="button")
    if about:
        made.props.update({"aria-label": about, "title": about})
    with made:
        if icon:
            ui.icon(icon).props("aria-hidden=true")
        if label:
            text("span", label)
    made.on("click", lambda: act())
    return made


def entry(label: str, act: Callable[[str], Any], *, value: str = "", hint: str = "", kind: str = "text") -> Element:
    """Make a text field with a label. act: called with the text on Enter. value: the first text."""
    with box("label", "field"):
        text("span", label, "field-name")
        made = box("input", "input", type=kind, placeholder=hint, autocomplete="off", spellcheck="false")
    # "^" sets the attribute. Vue sets the property `value` at each update, which would erase what somebody types.
    made.props["^value"] = value
    made.on("keydown.enter", lambda event: act(str(event.args or "")), js_handler="(e) => emit(e.target.value)")
    return made


def area(label: str, value: str) -> Element:
    """Make a text field of several lines with a label. value: the first text."""
    with box("label", "field"):
        text("span", label, "field-name")
        made = text("textarea", value, "input", rows="16", spellcheck="false")
    return made


def choice(label: str, options: Sequence[str], value: str, act: Callable[[str], Any], *, empty: str = "") -> Element:
    """Make a list of options with a label. act: called with the chosen option. empty: label of the option ""."""
    with box("label", "field"):
        text("span", label, "field-name")
        with box("select", "input") as made:
            for one in options:
                option = text("option", one or empty)
                option.props.update({"value": one} | ({"selected": True} if one == value else {}))
    made.on("change", lambda event: act(str(event.args)), js_handler="(e) => emit(e.target.value)")
    return made


def fill(field: Element, value: str) -> None:
    """Replace the text of an `entry`."""
    ui.run_javascript(f"getElement({field.id}).value = {in_script(value)}")


class Notice:
    """The line that shows the last failure; hidden if there is none."""

    def __init__(self) -> None:
        self._line = text("div", "", "notice", role="alert")
        self._line.set_visibility(False)

    def say(self, what: str) -> None:
        """Show a message; "" hides the line."""
        self._line.set_text(what)
        self._line.set_visibility(bool(what))

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Show errors of the gateway raised inside the block. The rest of the page stays as it was."""
        try:
            yield
        except Unauthenticated:
            ui.navigate.to("/sign-in")
        except PermissionDenied as error:
            self.say(f"Your key may not do that: {error}")
        except Unreachable as error:
            self.say(f"The gateway does not answer. {error} The page works again when it does.")
        except FreshetError as error:
            self.say(str(error))
        else:
            self.say("")


@dataclass(frozen=True, slots=True)
class Visit:
    """One opened page. query: its address's fields. roles: those of the browser's key, None if unknown."""

    client: AsyncClient
    settings: ConsoleSettings
    query: QueryParams
    notice: Notice
    has_key: bool
    roles: frozenset[str] | None = None

    def may(self, role: str) -> bool:
        """Return whether the key may have a role. If not, show that this part of the page is read-only."""
        is_allowed = self.roles is None or role in self.roles
        if not is_allowed:
            text("p", f"Read-only: your key lacks the role {role}.", "hint")
        return is_allowed


def add_page(access: Access, path: str, title: str, lead: str, show: Callable[[Visit], Awaitable[None]]) -> None:
    """Add a page. show: makes its content for a browser that may call the gateway."""

    @ui.page(path)
    async def page(request: Request) -> None:
        with page_frame(access, path, title, lead):
            visit = Visit(access.client, access.settings, request.query_params, Notice(), access.is_signed_in)
            why, roles = await access.admit()
            if why in (SIGN_IN, UNKNOWN_KEY):
                ui.navigate.to("/sign-in")
            elif why:
                visit.notice.say(why)
            else:
                await show(replace(visit, roles=roles))


def page_frame(access: Access, path: str, title: str, lead: str) -> Element:
    """Make the header and the main part with its title; return the main part, to use as a context manager."""
    ui.page_title(f"{title} · Freshet")
    ui.add_head_html('<link rel="stylesheet" href="/static/console.css"><script src="/static/console.js"></script>')
    ui.query(".nicegui-content").classes("page")
    text("a", "Skip to content", "skip", href="#main")
    with box("header", "top"):
        with box("a", "brand", href="/", aria_label="Freshet, start page"):
            box("img", "drop", src="/static/drop.svg", alt="", width="26", height="26")
            text("span", "Freshet")
        with box("nav", "tabs", aria_label="Pages"):
            for target, name in PAGES:
                link = text("a", name, "tab", href=target)
                if target == path:
                    link.props["aria-current"] = "page"
        if access.is_signed_in:
            button("Sign out", lambda: _sign_out(access), classes="button quiet")
    # A <div>, because NiceGUI already makes the page a <main>.
    main = box("div", "main", id="main", tabindex="-1")
    with main:
        text("h1", title)
        text("p", lead, "lead")
    return main


def _sign_out(access: Access) -> None:
    access.sign_out()
    ui.navigate.to("/sign-in")
