"""Dead letters on the page Health."""

from functools import partial

from freshet_client import DeadLetter, FreshetError
from nicegui.element import Element

from services.console.frame import Notice, Visit, box, button, text
from services.console.sentences import date_text

# The most dead letters of each topic.
LETTERS = 20


class Letters:
    """The list of dead letters. Each can be replayed after a preview of the replay."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._client = visit, visit.client
        with box("section", "panel", aria_label="Dead letters"):
            text("h2", "Dead letters")
            self.notice = Notice()
            self._about = text("p", "", "hint")
            self._list = box("ul", "plain")

    async def show(self) -> None:
        """Show the newest dead letters."""
        with self._list:
            if not self._visit.may("operator"):
                return
        with self.notice.failures():
            found = await self._client.dead_letters(max_letters=LETTERS)
            older = f" Older ones: {self._visit.settings.command('dead-letters list')}." if found.has_older else ""
            about = f"The newest unusable records, at most {LETTERS} of a topic.{older}"
            self._about.set_text(about if found.letters else "No record is set aside.")
            with self._list:
                for letter in found.letters:
                    self._letter(letter)

    def _letter(self, letter: DeadLetter) -> None:
        with box("li", "letter"):
            place = letter.position
            name = "" if place is None else f"{letter.topic}:{place.partition}:{place.offset}"
            text("strong", name, "isolated")
            text("span", letter.reason, "isolated")
            text("time", date_text(letter.written_time), "hint")
            done = letter.replayed_to
            if done is not None:
                text("span", f"Replayed to {letter.topic}:{done.partition}:{done.offset}.", "hint")
                return
            with box("div", "row") as rest:
                button("Replay", partial(self._replay, letter, rest, preview=True), about=f"Look at a replay of {name}")

    async def _replay(self, letter: DeadLetter, rest: Element, *, preview: bool) -> None:
        if letter.position is None:
            return
        # The buttons are removed first, so that a second click sends nothing. The gateway replays a record only once.
        rest.clear()
        try:
            found = await self._client.replay_dead_letter(letter.topic, letter.position, preview=preview)
        except FreshetError as error:
            _said(rest, f"It was not replayed, as far as is known: {error}")
            return
        if found.left_out or not preview:
            to = found.written_to
            done = "" if to is None else f"Replayed to {letter.topic}:{to.partition}:{to.offset}."
            _said(rest, done or f"Left out: {found.left_out}.")
            return
        once = f" As event {found.event_id} it counts once." if found.event_id else ""
        _said(rest, f"The record would be written to {letter.topic} again, as it was.{once}")
        with rest:
            write = partial(self._replay, letter, rest, preview=False)
            button("Write it again", write, icon="replay", classes="button danger")


def _said(rest: Element, what: str) -> None:
    with rest:
        text("span", what, "isolated", role="status")
