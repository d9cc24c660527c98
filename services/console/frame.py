"""What all pages share: header, sign-in, and messages of failed calls."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from freshet_client import AsyncClient, Conflict, FreshetError, PermissionDenied, Unauthenticated, Unreachable
from nicegui import app, ui
from nicegui.element import Element
from starlette.datastructures import QueryParams

from services.console.access import Access
from services.console.config import ConsoleSettings
from services.console.elements import Line, box, button, entry, handle, in_script, text, typed
from services.platform.errors import InvalidRequest

# By path: name and lead of a page, in the order of the header.
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
RELOAD_S = 3.0  # until a page that finds no gateway tries again
_SIGN_IN_LEAD = "This gateway asks for an API key. What you see and may change is what the key may."


class Notice(Line):
    """The line that shows the last failure."""

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Show errors of the gateway or of typed text that the block raises; the page stays as it was."""
        said = self._num_said
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
        except (FreshetError, InvalidRequest) as error:
            self.say(str(error))
        else:
            # Otherwise an outer block would hide the message of an inner one.
            if self._num_said == said:
                self.say("")


@dataclass
class Page:
    """A page in a tab. Its coroutine `show` makes the content; after a failure, what was made before stays.

    query: the fields of its address. status: shows what was done. roles: the key's roles, None if unknown.
    """

    client: AsyncClient
    settings: ConsoleSettings
    query: QueryParams
    status: Line
    has_key: bool
    roles: frozenset[str] | None

    def has(self, *roles: str) -> bool:
        """Return whether the key may have one of these roles."""
        return self.roles is None or not self.roles.isdisjoint(roles)

    def may(self, role: str) -> bool:
        """Return the same as `has`; if False, show that this part of the page is read-only."""
        if not self.has(role):
            text("p", f"Read-only: your key lacks the role {role}.", "hint")
        return self.has(role)

    def show_address(self, fields: object) -> None:
        """Show these fields in the browser's address."""
        ui.run_javascript(f"freshet.address({in_script(fields)})")


def add_page(access: Access, path: str, page: type[Any]) -> None:
    """Add a page. page: a subclass of `Page`."""

    @ui.page(path)
    async def show(request: Request) -> None:
        async def begin() -> None:
            try:
                roles = await access.admit(access.key)
            except Unreachable:
                ui.timer(RELOAD_S, ui.navigate.reload, once=True)
                raise
            client, has_key = access.client_of(access.key), bool(access.key)
            await page(client, access.settings, request.query_params, Line(), has_key, roles).show()

        with page_frame(access, path, *PAGES[path]):
            await handle(begin)


def add_sign_in(access: Access) -> None:
    """Add the page where a browser signs in with a key of the gateway."""

    @ui.page("/sign-in")
    async def sign_in() -> None:
        with page_frame(access, "/sign-in", "Sign in", _SIGN_IN_LEAD):

            async def show(_: str = "") -> None:
                if not (key := (await typed(field))[0].strip()):
                    raise FreshetError("Give a key: freshet keys create.")
                try:
                    await access.admit(key)
                except Unauthenticated as error:
                    raise FreshetError("The gateway does not know this key.") from error
                access.sign_in(key)
                ui.navigate.to("/")

            field = entry("API key", show, kind="password")
            button("Sign in", show, classes="button strong")


def page_frame(access: Access, path: str, title: str, lead: str) -> Element:
    """Make the header and the notice; return the main part, as a context manager."""
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
        if access.key:
            button("Sign out", access.sign_out, classes="button quiet")
    # A <div>, because NiceGUI already makes the page a <main>.
    with box("div", "main", id="main", tabindex="-1") as main:
        text("h1", title)
        text("p", lead, "lead")
        app.storage.client["notice"] = Notice("notice", "alert")
    return main
