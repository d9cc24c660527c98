"""Sign in: a key of the gateway, for this browser."""

from nicegui import ui

from services.console.access import Access
from services.console.frame import Notice, button, entry, page_frame

PATH = "/sign-in"


def add(access: Access) -> None:
    """Add the page."""

    @ui.page(PATH)
    async def sign_in() -> None:
        lead = "This gateway asks for an API key. What you see and may change is what the key may."
        with page_frame(access, PATH, "Sign in", lead):
            notice = Notice()

            async def show(key: str) -> None:
                problem = (await access.admit(key.strip()))[0] if key.strip() else "Give a key: freshet keys create."
                notice.say(problem)
                if not problem:
                    access.sign_in(key.strip())
                    ui.navigate.to("/")

            field = entry("API key", show, kind="password")

            async def pressed() -> None:
                await show(str(await ui.run_javascript(f"getElement({field.id}).value") or ""))

            button("Sign in", pressed, classes="button strong")
