"""Rules: the standing rules, an editor, and a preview of the edited rules for up to ten users."""

from collections.abc import Sequence
from typing import Any

from freshet.v1 import common_pb2, gateway_pb2
from freshet_client import InvalidArgument, Recommendation, Rule, StandingRules
from freshet_client.wire import read, write
from google.protobuf.json_format import MessageToDict
from nicegui import ui

from services.console.access import LOOK
from services.console.frame import Line, Visit, area, box, button, entry, in_script, item_link, panel, text, typed
from services.console.snippets import code_of, curl, snippet
from services.contracts.yaml_files import EFFECTS, parse_rules, rules_text, where_text
from services.platform.errors import InvalidRequest

MAX_USERS, SHOWN, SAVE_S = 10, 5, 30.0
_MEANS = {
    "boost": "adds {:g} to the score of",
    "bury": "takes {:g} from the score of",
    "pin": "puts at position {} the best of",
    "cap": "lets at most {} be answered of",
}
EXAMPLE = "rules:\n- name: new-arrivals\n  categories: [Drama]\n  boost: 0.1\n"


class Rules:
    def __init__(self, visit: Visit) -> None:
        self._visit, self._client, self._notice = visit, visit.client, visit.notice
        self._revision, self._is_saving = 0, False
        self._status = Line()
        self._body = box("div", "columns even")
        self._tried = box("div", "wide")

    async def begin(self) -> None:
        found = await self._client.rules()
        with self._body:
            self._standing = box("section", "panel", aria_label="Standing rules")
            self._editor(found.rules)
        self._show(found)

    def _show(self, found: StandingRules) -> None:
        self._revision = found.revision
        self._standing.clear()
        with self._standing:
            text("h2", "Standing rules")
            with box("ol", "plain"):
                for rule in found.rules:
                    text("li", sentence_of(rule), "isolated")
            if not found.rules:
                text("p", "There are none.", "hint")
            for problem in found.problems:
                text("p", f"Not applied by this model: {problem}", "notice isolated")
            text("p", f"Revision {found.revision}. At 0 those of the gateway's file apply.", "hint")
            with box("details", "code"):
                code_of(self._visit, "This page", "rules", gateway_pb2.ListRulesRequest(), {})
            plain = [MessageToDict(one, preserving_proto_field_name=True) for one in _messages(found.rules)]
            request = {"rules": plain, "expected_revision": found.revision}
            with box("details", "code"):
                text("summary", "These rules as curl, to put them")
                base, has_key = self._visit.settings.gateway_http, self._visit.has_key
                snippet("curl", curl(base, "PutRules", request, with_key=has_key))

    def _editor(self, rules: Sequence[Rule]) -> None:
        with panel("Change them"):
            shown = rules_text(_messages(rules)) if rules else EXAMPLE
            self._text = area("Rules, as in a rules file", shown).classes("editor")
            if not self._visit.may("operator"):
                return
            users = self._visit.query.get("users", "")
            self._field = entry("Users to try them on", lambda _: self._try(), value=users, hint="up to ten ids")
            with box("div", "row"):
                button("Before and after", self._try, icon="compare")
                button("Save for all users", self._save, icon="save", classes="button strong")

    async def _typed(self) -> tuple[Sequence[Rule], list[str]]:
        """Return the rules and users in the fields. Raises: InvalidArgument for rules that cannot be read."""
        written, users = await typed(self._text, self._field)
        ui.run_javascript(f"freshet.address({in_script({'users': users} if users.strip() else {})})")
        try:
            rules = [read(one) for one in parse_rules("rules", written)] if written.strip() else []
        except InvalidRequest as error:
            raise InvalidArgument(error.message) from error
        return rules, [one.strip() for one in users.split(",") if one.strip()][:MAX_USERS]

    async def _try(self) -> None:
        with self._notice.failures(), self._tried:
            rules, users = await self._typed()
            if not users:
                raise InvalidArgument("Give the ids of up to ten users to try them on.")
            self._tried.clear()
            headline, changed = text("h2", "", aria_live="polite"), 0
            ask: dict[str, Any] = {"with_details": True, "context": LOOK}
            with box("div", "figures"):
                for user in users:
                    before = await self._client.recommend(user, SHOWN, **ask)
                    after = await self._client.recommend(user, SHOWN, rules=rules, without_standing_rules=True, **ask)
                    changed += before.item_ids != after.item_ids
                    _before_and_after(user, before, after)
            headline.set_text(f"{changed} of {len(users)} lists change")

    async def _save(self) -> None:
        if self._is_saving:
            return
        self._is_saving = True
        try:
            with self._notice.failures():
                rules, _ = await self._typed()
                done = await self._client.put_rules(rules, expected_revision=self._revision, timeout_s=SAVE_S)
                self._show(await self._client.rules())
                self._status.say(f"Saved as revision {done.revision}; gateways apply it within a second or two.")
        finally:
            self._is_saving = False


def _messages(rules: Sequence[Rule]) -> list[common_pb2.Rule]:
    return [write(common_pb2.Rule(), one) for one in rules]


def sentence_of(rule: Rule) -> str:
    """What a rule does."""
    effect = next(name for name in EFFECTS if getattr(rule, name) is not None)
    items = [f"items {', '.join(rule.item_ids[:5])}{' …' * (len(rule.item_ids) > 5)}"] if rule.item_ids else []
    items += [f"category {' or '.join(rule.categories)}"] if rule.categories else []
    items += [where_text(one) for message in _messages([rule]) for one in message.where]
    return f"{rule.name}: {_MEANS[effect].format(getattr(rule, effect))} {' and '.join(items)}"


def _before_and_after(user: str, before: Recommendation, after: Recommendation) -> None:
    with panel(user, f"User {user}"):
        for name, answer, other in (("Now", before, None), ("With these rules", after, before)):
            text("p", name, "field-name")
            with box("ol", "plain"):
                for place, one in enumerate(answer.items):
                    with box("li", "pair"):
                        item_link(one, "/why", user=user)
                        if other is not None and (move := _move(one.item_id, place, other.item_ids)):
                            text("span", move, f"move {'new' if move == 'new' else 'up' if move[0] == '+' else 'down'}")


def _move(item_id: str, place: int, before: Sequence[str]) -> str:
    up = before.index(item_id) - place if item_id in before else None
    return "new" if up is None else f"{up:+d}" if up else ""
