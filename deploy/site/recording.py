"""Film twenty seconds of the console's page *Try it* for the README: `python deploy/site/recording.py`.

It needs chromium and the demo's data (`make demo ARGS=--keep`). It acts as a user of its own. A frame is kept while the
page looks the same, so the film shows what a person would see, at the speed at which it happened.
"""

import io
import sys
import time
import uuid
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

FILE = Path(__file__).parents[2] / "docs" / "guide" / "console.gif"
CHROMIUM = "/usr/bin/chromium"
SIZE = {"width": 880, "height": 600}
MAX_BYTES, COLOURS = 2_000_000, 48
# Headless browsers draw no pointer.
POINTER = """() => {
  const dot = document.createElement("div");
  Object.assign(dot.style, {position: "fixed", width: "18px", height: "18px", borderRadius: "50%", zIndex: 9999,
    background: "rgba(220, 60, 60, .55)", transform: "translate(-50%, -50%)", pointerEvents: "none"});
  document.body.append(dot);
  addEventListener("mousemove", (e) => { dot.style.left = `${e.clientX}px`; dot.style.top = `${e.clientY}px`; }, true);
}"""


@dataclass
class Film:
    """Frames of a page, each with the second at which it was taken."""

    page: Page
    frames: list[tuple[float, bytes]] = field(default_factory=list)

    def roll(self, seconds: float) -> None:
        """Take frames for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            picture = self.page.screenshot()
            if not self.frames or picture != self.frames[-1][1]:
                self.frames.append((time.monotonic(), picture))

    def click(self, target: Locator, seconds: float) -> None:
        """Move the pointer there, click, and film what follows."""
        target.hover()
        self.roll(0.6)
        target.click()
        self.roll(seconds)

    def write(self, file: Path) -> None:
        """Write a GIF that repeats. Raises: ValueError if it is too large for the repository."""
        times = [second for second, _ in self.frames]
        lengths = [*(1000 * (after - before) for before, after in pairwise(times)), 2500]
        pictures = [Image.open(io.BytesIO(picture)).convert("RGB") for _, picture in self.frames]
        palette = pictures[-1].quantize(COLOURS)
        first, *others = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]
        first.save(file, save_all=True, append_images=others, duration=lengths, loop=0, optimize=True)
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{file}: {size:,} bytes; allowed: {MAX_BYTES:,}")


def main(base: str) -> None:
    """Act as a new user: like three items, hide one, take one like back."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(f"{base}/?user=guest-{uuid.uuid4().hex[:6]}")
        expect(page.locator(".card")).to_have_count(12)
        page.evaluate(POINTER)
        film, likes = Film(page), page.locator(".card .act.like")
        film.roll(1.5)
        for place in (3, 1, 4):
            film.click(likes.nth(place), 3.2)
        film.click(page.locator(".card .act.hide").first, 2.4)
        film.click(page.get_by_role("button", name="Undo").first, 2.6)
        browser.close()
    film.write(FILE)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:50060")
