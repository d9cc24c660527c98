"""Rules: the standing rules, an editor, and a preview of the edited rules for up to ten users."""

from collections.abc import Sequence
from functools import partial

from freshet.v1 import common_pb2, gateway_pb2
from freshet_client import InvalidArgument, Rule, StandingRules
from freshet_client.wire import read, write

from services.console.access import LOOK
from services.console.elements import area, box, button, entry, folded, panel, refill, text, texts, two_lists, typed
from services.console.frame import Page
from services.console.snippets import code_of
from services.contracts.yaml_files import EFFECTS, parse_rules, rules_text, where_text

MAX_USERS, SHOWN, SAVE_S = 10, 5, 30.0
_MEANS = {
    "boost": "adds {:g} to the score of",
    "bury": "takes {:g} from the score of",
    "pin": "puts at position {} the best of",
    "cap": "lets at most {} be answered of",
}
EXAMPLE = "rules:\n- name: new-arrivals\n  categories: [Drama]\n  boost: 0.1\n"


class Rules(Page):
    async def show(self) -> None:
        self._revision, self._is_saving = 0, False
        self._body = box("div", "columns even")
        self._tried = box("div", "wide")
        found = await self.client.rules()
        with self._body:
            self._standing = box("section", "panel", aria_label="Standing rules")
            self._editor(found.rules)
        self._show(found)

    def _show(self, found: StandingRules) -> None:
        self._revision = found.revision
        with refill(self._standing):
            text("h2", "Standing rules")
            texts(map(sentence_of, found.rules))
            if not found.rules:
                text("p", "There are none.", "hint")
            for problem in found.problems:
                text("p", f"Not applied by this model: {problem}", "notice isolated")
            text("p", f"Revision {found.revision}. At 0 those of the gateway's file apply.", "hint")
            with folded("This page as curl and Python"):
                code_of(self, "rules", gateway_pb2.ListRulesRequest(), {})
            with folded("These rules, to put them, as curl and Python"):
                given = {"rules": found.rules, "expected_revision": found.revision}
                code_of(self, "put_rules", gateway_pb2.PutRulesRequest(), given)

    def _editor(self, rules: Sequence[Rule]) -> None:
        with panel("Change them"):
            shown = rules_text(_messages(rules)) if rules else EXAMPLE
            self._text = area("Rules, as in a rules file", shown).classes("editor")
            if not self.may("operator"):
                return
            users = self.query.get("users", "")
            self._field = entry("Users to try them on", lambda _: self._try(), value=users, hint="up to ten ids")
            with box("div", "row"):
                button("Before and after", self._try, icon="compare")
                button("Save for all users", self._save, icon="save", classes="button strong")

    async def _typed(self) -> tuple[Sequence[Rule], list[str]]:
        """Return the rules and users in the fields. Raises: InvalidRequest for rules that cannot be read."""
        written, users = await typed(self._text, self._field)
        self.show_address({"users": users} if users.strip() else {})
        rules = [read(one) for one in parse_rules("rules", written)] if written.strip() else []
        return rules, [one.strip() for one in users.split(",") if one.strip()][:MAX_USERS]

    async def _try(self) -> None:
        rules, users = await self._typed()
        if not users:
            raise InvalidArgument("Give the ids of up to ten users to try them on.")
        with refill(self._tried):
            headline, changed = text("h2", "", aria_live="polite"), 0
        answer = partial(self.client.recommend, k=SHOWN, with_details=True, context=LOOK)
        with self._tried, box("div", "figures"):
            for user in users:
                now, then = await answer(user), await answer(user, rules=rules, without_standing_rules=True)
                changed += now.item_ids != then.item_ids
                two_lists(f"User {user}", user, ("Now", now), ("With these rules", then))
        headline.set_text(f"{changed} of {len(users)} lists change")

    async def _save(self) -> None:
        if self._is_saving:
            return
        self._is_saving = True
        try:
            rules, _ = await self._typed()
            done = await self.client.put_rules(rules, expected_revision=self._revision, timeout_s=SAVE_S)
            self._show(await self.client.rules())
            self.status.say(f"Saved as revision {done.revision}; gateways apply it within a second or two.")
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
