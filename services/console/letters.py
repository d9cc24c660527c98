"""Dead letters on the page Health."""

from functools import partial

from freshet_client import DeadLetter, FreshetError, StreamPosition
from nicegui.element import Element

from services.console.frame import Notice, Visit, box, button, panel, text
from services.console.sentences import date_text

# The most dead letters of each topic.
LETTERS = 20


class Letters:
    """The list of dead letters. Each can be replayed after a preview of the replay."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._client = visit, visit.client
        with panel("Dead letters"):
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
            place, done = letter.position, letter.replayed_to
            name = "" if place is None else f"{letter.topic}:{place.partition}:{place.offset}"
            text("strong", name, "isolated")
            text("span", letter.reason, "isolated")
            text("time", date_text(letter.written_time), "hint")
            if done is not None:
                text("span", f"Replayed to {letter.topic}:{done.partition}:{done.offset}.", "hint")
            elif place is not None:
                with box("div", "row") as rest:
                    look = partial(self._replay, letter, place, rest, preview=True)
                    button("Replay", look, about=f"Look at a replay of {name}")

    async def _replay(self, letter: DeadLetter, place: StreamPosition, rest: Element, *, preview: bool) -> None:
        # The buttons are removed first, so that a second click sends nothing. The gateway replays a record only once.
        rest.clear()
        try:
            found = await self._client.replay_dead_letter(letter.topic, place, preview=preview)
        except FreshetError as error:
            said, again = f"It was not replayed, as far as is known: {error}", False
        else:
            to, again = found.written_to, preview and not found.left_out
            replayed = "" if to is None else f"Replayed to {letter.topic}:{to.partition}:{to.offset}."
            said = replayed or f"Left out: {found.left_out}."
            if again:
                once = f" As event {found.event_id} it counts once." if found.event_id else ""
                said = f"The record would be written to {letter.topic} again, as it was.{once}"
                said += " If it is still unusable, it becomes a new dead letter."
        with rest:
            text("span", said, "isolated", role="status")
            if again:
                write = partial(self._replay, letter, place, rest, preview=False)
                button("Write it again", write, icon="replay", classes="button danger")
