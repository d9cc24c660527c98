"""User: what is stored about a user, the user's list now, and how to forget the user."""

from freshet_client import FreshetError, StoredEvent, UserReport
from nicegui import ui

from services.console.access import LOOK
from services.console.frame import Visit, box, button, entry, item_link, link, panel, text
from services.console.sentences import ago, date_text

PAGE, LIST, SHOWN, NAMED = 50, 10, 5, 10
ROLES = {"positive": "spoke for it", "negative": "spoke against it", "exposure": "was shown it", "neutral": ""}
# Kinds of data that a forget finds -> their labels.
FOUND = {
    "history_events": "events in the history",
    "seen_items": "seen items",
    "query_states": "states",
    "summed_interactions": "interactions in the sums of items",
    "remembered_interactions": "remembered interactions that vote",
}


class User:
    def __init__(self, visit: Visit) -> None:
        self._visit, self._client, self._notice, self._shown = visit, visit.client, visit.notice, 0
        self._user_id = visit.query.get("user", "")
        with box("div", "row end"):
            entry("User id", self._open, value=self._user_id, hint="an id, then Enter")
        self._body = box("div", "columns")

    async def begin(self) -> None:
        if self._user_id:
            self._show(await self._client.user(self._user_id, max_events=PAGE))
            await self._show_list()
            await self._show_answers()

    def _open(self, user_id: str) -> None:
        ui.navigate.to(link("/user", user=user_id.strip()))

    def _show(self, found: UserReport) -> None:
        with self._body:
            with box("div", "side"):
                self._facts(found)
                with panel("The list now"):
                    self._list = box("ol", "plain")
                    text("a", "Try it as this user", "button", href=link("/", user=self._user_id))
                with panel("What was shown"):
                    self._answers = box("ol", "plain")
                    self._looked = text("p", "", "hint")
                with panel("Forget this user", "Forget"):
                    text("p", "Look first at what would be removed. It cannot be taken back.", "hint")
                    self._forget = box("div", "stack")
                    with self._forget:
                        if self._visit.may("eraser"):
                            button("What would be removed", self._preview, icon="preview")
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
                self._event(one)
        self._shown += len(found.events)
        self._more.set_visibility(self._shown < found.num_events)

    def _event(self, one: StoredEvent) -> None:
        with box("li", f"event {one.role}"):
            with box("span", "event-main"):
                item_link(one, "/why", user=self._user_id)
                text("span", f"{one.type} {one.value:g}" if one.value else one.type, "tag isolated")
            with box("span", "event-side"):
                text("span", ROLES.get(one.role, one.role), "hint")
                text("time", date_text(one.event_time), "hint")

    async def _show_older(self) -> None:
        with self._notice.failures():
            self._add(await self._client.user(self._user_id, max_events=PAGE, skip_events=self._shown))

    async def _show_list(self) -> None:
        answer = await self._client.recommend(self._user_id, LIST, with_details=True, context=LOOK)
        with self._list:
            for one in answer.items:
                with box("li"):
                    item_link(one, "/why", user=self._user_id)

    async def _show_answers(self) -> None:
        found = await self._client.exposures(self._user_id, max_answers=SHOWN)
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

    async def _preview(self) -> None:
        with self._notice.failures():
            report = await self._client.forget_user(self._user_id, preview=True)
            self._forget.clear()
            with self._forget:
                with box("ul", "plain"):
                    for name, number in report.found.items():
                        text("li", f"{number:,} {FOUND.get(name, name)}")
                button("Forget all of it", self._forget_now, icon="delete_forever", classes="button danger")

    async def _forget_now(self) -> None:
        # Cleared first, so that neither a second click nor the browser's Back button can ask again.
        self._forget.clear()
        with self._forget:
            text("p", "Being forgotten …", "hint")
        try:
            report = await self._client.forget_user(self._user_id)
        except FreshetError as error:
            self._notice.say(str(error))
            self._forget.clear()
            with self._forget:
                button("What would be removed", self._preview, icon="preview")
            return
        self._forget.clear()
        self._events.clear()
        self._more.set_visibility(False)
        with self._forget:
            done = "Forgotten." if report.is_applied else "Written; not every process has applied it yet."
            text("p", done, role="status")
            for sentence in report.remains:
                text("p", sentence, "hint")
