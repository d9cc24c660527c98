"""User: what is stored about a user, the user's list now, and how to forget the user."""

from freshet_client import ForgetReport, FreshetError, StoredEvent, UserReport
from nicegui import ui

from services.console.access import LOOK, Access
from services.console.frame import Visit, add_page, box, button, entry, text
from services.console.links import try_link, user_link, why_link
from services.console.sentences import ago, date_text

PATH = "/user"
PAGE, LIST, SHOWN, NAMED = 50, 10, 5, 3
ROLES = {"positive": "spoke for it", "negative": "spoke against it", "exposure": "was shown it", "neutral": ""}
# Kinds of data that a forget finds -> their labels.
FOUND = {
    "history_events": "events in the history",
    "seen_items": "seen items",
    "query_states": "states",
    "summed_interactions": "interactions in the sums of items",
    "remembered_interactions": "remembered interactions that vote",
}


def add(access: Access) -> None:
    """Add the page."""

    lead = "What is stored of somebody, and what they get now."
    add_page(access, PATH, "User", lead, lambda visit: User(visit).begin())


class User:
    """One tab's page."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._client, self._notice, self._shown = visit, visit.client, visit.notice, 0
        self._user_id = visit.query.get("user", "")
        with box("div", "row end"):
            entry("User id", self._open, value=self._user_id, hint="an id, then Enter")
        self._body = box("div", "columns")

    async def begin(self) -> None:
        """Fetch the report, the list and the newest answers, and show them."""
        if not self._user_id:
            return
        with self._notice.failures():
            found = await self._client.user(self._user_id, max_events=PAGE)
            self._show(found)
            await self._show_list()
            await self._show_answers()

    def _open(self, user_id: str) -> None:
        ui.navigate.to(user_link(user_id.strip()))

    def _show(self, found: UserReport) -> None:
        with self._body:
            with box("div", "side"):
                self._facts(found)
                with box("section", "panel", aria_label="The list now"):
                    text("h2", "The list now")
                    self._list = box("ol", "plain")
                    text("a", "Try it as this user", "button", href=try_link(self._user_id))
                with box("section", "panel", aria_label="What was shown"):
                    text("h2", "What was shown")
                    self._answers = box("ol", "plain")
                    self._looked = text("p", "", "hint")
                self._forget_panel()
            with box("section", "panel wide", aria_label="History"):
                text("h2", "History, newest first")
                if not found.events:
                    text("p", "Nothing is stored of this user.", "hint")
                self._events = box("ol", "timeline")
                self._more = button("Show older", self._show_older, icon="expand_more")
        self._add(found)

    def _facts(self, found: UserReport) -> None:
        with box("section", "panel", aria_label="What is stored"):
            text("h2", self._user_id, "isolated")
            text("p", f"{found.num_events:,} events in the history; {found.num_seen:,} items count as seen.")
            if found.state_time is None:
                text("p", f"Model {found.model_version} has no state of this user.", "hint")
            else:
                whole = "all of the history" if found.state_reaches_history else "not all of the history yet"
                text(
                    "p",
                    f"The state of model {found.model_version} is {ago(found.state_time)} old and reflects {whole}.",
                )
                if found.state_position is not None:
                    place = f"partition {found.state_position.partition}, offset {found.state_position.offset}"
                    text("p", f"It reaches {place} of the stream.", "hint")

    def _add(self, found: UserReport) -> None:
        with self._events:
            for one in found.events:
                self._event(one)
        self._shown += len(found.events)
        self._more.set_visibility(self._shown < found.num_events)

    def _event(self, one: StoredEvent) -> None:
        with box("li", f"event {one.role}"):
            with box("span", "event-main"):
                text("a", one.title or one.item_id, "isolated", href=why_link(self._user_id, one.item_id))
                value = f" {one.value:g}" if one.value else ""
                text("span", f"{one.type}{value}", "tag isolated")
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
                    text("a", one.title or one.item_id, "isolated", href=why_link(self._user_id, one.item_id))

    async def _show_answers(self) -> None:
        found = await self._client.exposures(self._user_id, max_answers=SHOWN)
        with self._answers:
            for one in found.answers:
                names = ", ".join(item.title or item.item_id for item in one.items[:NAMED])
                more = f" and {len(one.items) - NAMED:,} more" if len(one.items) > NAMED else ""
                with box("li"):
                    text("span", f"{date_text(one.shown_time)}, {one.surface}, model {one.model_version}", "hint")
                    text("p", f"{names or 'nothing'}{more}", "isolated")
        back = f"looked at since {date_text(found.looked_back_to)}" if found.looked_back_to else "none is recorded"
        self._looked.set_text("All answers that are recorded." if found.is_complete else f"The newest answers; {back}.")

    def _forget_panel(self) -> None:
        with box("section", "panel", aria_label="Forget"):
            text("h2", "Forget this user")
            text("p", "Look first at what would be removed. It cannot be taken back.", "hint")
            self._forget = box("div", "stack")
            with self._forget:
                if self._visit.may("eraser"):
                    button("What would be removed", self._preview, icon="preview")

    async def _preview(self) -> None:
        with self._notice.failures():
            report = await self._client.forget_user(self._user_id, preview=True)
            self._forget.clear()
            with self._forget:
                _found(report)
                button("Forget all of it", self._forget_now, icon="delete_forever", classes="button danger")

    async def _forget_now(self) -> None:
        # Cleared first, so that neither a second click nor the browser's Back button can ask again.
        self._forget.clear()
        with self._forget:
            text("p", "Being forgotten …", "hint")
        outcome = "Forgotten."
        try:
            report = await self._client.forget_user(self._user_id)
            if not report.is_applied:
                outcome = "Written; not every process has applied it yet."
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
            text("p", outcome, role="status")
            for sentence in report.remains:
                text("p", sentence, "hint")


def _found(report: ForgetReport) -> None:
    with box("ul", "plain"):
        for name, number in report.found.items():
            text("li", f"{number:,} {FOUND.get(name, name)}")
