"""User: what is stored about a user, the user's list now, and how to forget the user."""

from freshet_client import UserReport
from nicegui import ui

from services.console.access import LOOK
from services.console.elements import box, button, confirmed, entry, item_link, item_list, link, panel, refill, text
from services.console.frame import Page
from services.console.sentences import ago, date_text

PAGE, LIST, SHOWN, NAMED = 50, 10, 5, 10
ROLES = {"positive": "spoke for it", "negative": "spoke against it", "exposure": "was shown it", "neutral": ""}
# Labels of the kinds of data that ForgetUser finds.
FOUND = {
    "history_events": "events in the history",
    "seen_items": "seen items",
    "query_states": "states",
    "summed_interactions": "interactions in the sums of items",
    "remembered_interactions": "remembered interactions that vote",
}


class User(Page):
    async def show(self) -> None:
        self._shown, self._user_id = 0, self.query.get("user", "")
        with box("div", "row end"):
            entry("User id", self._open, value=self._user_id, hint="an id, then Enter")
        self._body = box("div", "columns")
        if self._user_id:
            self._show(await self.client.user(self._user_id, max_events=PAGE))
            answer = await self.client.recommend(self._user_id, LIST, with_details=True, context=LOOK)
            with self._list:
                item_list(answer.items, "/why", user=self._user_id)
            await self._show_answers()

    def _open(self, user_id: str) -> None:
        ui.navigate.to(link("/user", user=user_id.strip()))

    def _show(self, found: UserReport) -> None:
        with self._body:
            with box("div", "side"):
                self._facts(found)
                with panel("The list now"):
                    self._list = box()
                    text("a", "Try it as this user", "button", href=link("/", user=self._user_id))
                with panel("What was shown"):
                    self._answers = box("ol", "plain")
                    self._looked = text("p", "", "hint")
                with panel("Forget this user", "Forget"):
                    text("p", "Look first at what would be removed. It cannot be taken back.", "hint")
                    with box("div", "stack") as self._forget:
                        if self.may("eraser"):
                            button("What would be removed", self._forget_all, icon="preview")
            with panel("History, newest first", "History", "panel wide"):
                if not found.events:
                    text("p", "Nothing is stored of this user.", "hint")
                self._events = box("ol", "timeline")
                self._more = button("Show older", self._show_older, icon="expand_more")
        self._add(found)

    def _facts(self, found: UserReport) -> None:
        with panel(self._user_id, "What is stored"):
            text("p", f"{found.num_events:,} events in the history; {found.num_seen:,} items count as seen.")
            if found.state_time is None:
                text("p", f"Model {found.model_version} has no state of this user.", "hint")
                return
            whole = "all of the history" if found.state_reaches_history else "not all of the history yet"
            state = f"The state of model {found.model_version} is {ago(found.state_time)} old"
            text("p", f"{state} and reflects {whole}.")
            if (place := found.state_position) is not None:
                text("p", f"It reaches partition {place.partition}, offset {place.offset} of the stream.", "hint")

    def _add(self, found: UserReport) -> None:
        with self._events:
            for one in found.events:
                with box("li", f"event {one.role}"):
                    with box("span", "event-main"):
                        item_link(one, "/why", user=self._user_id)
                        text("span", f"{one.type} {one.value:g}" if one.value else one.type, "tag isolated")
                    with box("span", "event-side"):
                        text("span", ROLES.get(one.role, one.role), "hint")
                        text("time", date_text(one.event_time), "hint")
        self._shown += len(found.events)
        self._more.set_visibility(self._shown < found.num_events)

    async def _show_older(self) -> None:
        self._add(await self.client.user(self._user_id, max_events=PAGE, skip_events=self._shown))

    async def _show_answers(self) -> None:
        found = await self.client.exposures(self._user_id, max_answers=SHOWN)
        with self._answers:
            for one in found.answers:
                with box("li"):
                    text("span", f"{date_text(one.shown_time)}, {one.surface}, model {one.model_version}", "hint")
                    with box("p", "pair"):
                        for item in one.items[:NAMED]:
                            item_link(item, "/why", user=self._user_id)
                        more = len(one.items) - NAMED
                        text("span", f"and {more:,} more" if more > 0 else "" if one.items else "nothing", "hint")
        back = f"looked at since {date_text(found.looked_back_to)}" if found.looked_back_to else "none is recorded"
        self._looked.set_text("All answers that are recorded." if found.is_complete else f"The newest answers; {back}.")

    async def _forget_all(self) -> None:
        """Show what would be removed; after a confirmation, forget the user."""
        found = (await self.client.forget_user(self._user_id, preview=True)).found
        if not await confirmed([f"{n:,} {FOUND.get(name, name)}" for name, n in found.items()], "Forget all of it"):
            return
        report = await self.client.forget_user(self._user_id)
        self._events.clear()
        self._more.set_visibility(False)
        with refill(self._forget):
            done = "Forgotten." if report.is_applied else "Written; not every process has applied it yet."
            text("p", done, role="status")
            for sentence in report.remains:
                text("p", sentence, "hint")
