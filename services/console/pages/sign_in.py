"""Sign in: a key of the gateway, for this browser."""

from nicegui import ui

from services.console.access import Access
from services.console.frame import Notice, button, entry, page_frame, typed

PATH, LEAD = "/sign-in", "This gateway asks for an API key. What you see and may change is what the key may."


def add(access: Access) -> None:
    """Add the page."""

    @ui.page(PATH)
    async def sign_in() -> None:
        with page_frame(access, PATH, "Sign in", LEAD):
            notice = Notice()

            async def show(key: str) -> None:
                problem = (await access.admit(key.strip()))[0] if key.strip() else "Give a key: freshet keys create."
                notice.say(problem)
                if not problem:
                    access.sign_in(key.strip())
                    ui.navigate.to("/")

            async def pressed() -> None:
                await show(*await typed(field))

            field = entry("API key", show, kind="password")
            button("Sign in", pressed, classes="button strong")
