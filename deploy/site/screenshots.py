"""Take the console's pictures for docs/guide/console.md from a running one: `python deploy/site/screenshots.py`.

It needs chromium, the demo's data (`make demo ARGS=--keep`) and events that arrive. It acts as a new user.
"""

import sys
import uuid
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FOLDER = Path(__file__).parents[2] / "docs" / "guide"
MAX_BYTES = 150_000
RULES = """rules:
- {name: less-drama, categories: [Drama], bury: 0.2}
- {name: one-for-children, categories: [Children], pin: 3}
"""


def like(page: Page, *places: int) -> None:
    """Like the cards at these positions, one after the other."""
    for place in places:
        title = page.locator(".card .title").nth(place).inner_text()
        page.locator(".card .act.like").nth(place).click()
        expect(page.locator(".card .title").get_by_text(title, exact=True)).to_have_count(0)


def main(base: str) -> None:
    """Write one PNG a page."""
    user = f"guest-{uuid.uuid4().hex[:6]}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 740}, reduced_motion="reduce")
        page.goto(f"{base}/?user={user}")
        expect(page.locator(".card")).to_have_count(12)
        like(page, 1, 3, 5)
        page.mouse.move(0, 0)
        shot(page, "try-it")
        item = page.locator(".card").nth(1).get_attribute("data-item")
        page.goto(f"{base}/user?user={user}")
        expect(page.locator(".event")).to_have_count(3)
        shot(page, "user")
        page.goto(f"{base}/why?user={user}&item={item}")
        expect(page.locator(".legend")).to_be_visible()
        shot(page, "why")
        page.goto(f"{base}/items?item={item}")
        expect(page.get_by_label("Who is like it").locator("a")).to_have_count(8)
        shot(page, "items")
        page.goto(f"{base}/live")
        expect(page.get_by_label("As they come").locator("li").first).to_be_visible(timeout=60_000)
        page.wait_for_timeout(20_000)  # The plots need samples.
        shot(page, "live")
        page.goto(f"{base}/health")
        expect(page.locator(".verdict")).to_contain_text("Every part is ready")
        expect(page.locator(".plot canvas")).to_have_count(4)
        shot(page, "health")
        page.goto(f"{base}/models")
        expect(page.locator(".verdict").first).to_be_visible()
        shot(page, "models")
        page.goto(f"{base}/rules?users={user}")
        page.get_by_label("Rules, as in a rules file").fill(RULES)
        page.get_by_role("button", name="Before and after").click()
        expect(page.get_by_role("heading", name="lists change")).to_be_visible()
        page.set_viewport_size({"width": 1280, "height": 1080})
        shot(page, "rules")
        experiments(page, base)
        browser.close()


def experiments(page: Page, base: str) -> None:
    """Of the newest running experiment, where one runs and its results are published (docs/guide/console.md)."""
    page.set_viewport_size({"width": 1280, "height": 740})
    page.goto(f"{base}/experiments")
    newest = page.locator(".experiment.running").first
    if newest.count():
        newest.get_by_role("link", name="What differs").click()
        people = page.get_by_label("User ids")
        people.fill("1, 2, 3, 4")
        people.press("Enter")
        expect(page.locator(".verdict")).to_be_visible()
        page.get_by_label("What differs").evaluate("one => one.scrollIntoView()")
        shot(page, "experiments")
        page.goto(f"{base}/results")
        expect(page.locator(".plot canvas")).to_be_visible()
        shot(page, "results")


def shot(page: Page, name: str) -> None:
    """Raises: ValueError for a picture that is too large for the repository."""
    file = FOLDER / f"console-{name}.png"
    page.screenshot(path=file)
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file}: {size} bytes; allowed: {MAX_BYTES}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:50060")
