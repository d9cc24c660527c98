"""Why: the parts of an item's score for a user, and its rank in the list or the reason for its absence."""

from contextlib import suppress
from operator import attrgetter

from freshet_client import AsyncClient, ExplainedRule, Explanation, Filter, NotFound, VotingInteractions
from nicegui import ui

from services.console.access import LOOK
from services.console.elements import box, button, entry, folded, item_list, link, panel, table, text, texts, typed
from services.console.frame import Page
from services.console.sentences import duration

DEPTH, MAX_PAIRS = 1_000, 12
# The parts of a score: CSS class, name and meaning.
PARTS = (
    ("model", "Model", "what training learned of people and items"),
    ("refreshed", "Since training", "what people did with this item since training"),
    ("votes", "Votes", "remembered interactions of people and items like these"),
)


async def place_of(client: AsyncClient, user_id: str, item_id: str) -> tuple[int, str]:
    """Return the item's rank in the user's list (0: not in it), and a sentence with the rank or why there is none."""
    ranked = (await client.recommend(user_id, DEPTH, context=LOOK)).item_ids
    if item_id in ranked:
        rank = ranked.index(item_id) + 1
        return rank, f"It is number {rank:,} of this user's list now."
    alone = Filter(allow_item_ids=[item_id])
    if (await client.recommend(user_id, 1, filter=alone, context=LOOK)).items:
        return 0, f"It may be answered, and {len(ranked):,} items score higher."
    alone = Filter(allow_item_ids=[item_id], exclude_seen=False)
    if (await client.recommend(user_id, 1, filter=alone, context=LOOK)).items:
        return 0, "It is left out: this user had it already, and seen items do not come again."
    return 0, "It is left out: it is withdrawn, not available, or unknown to the catalogue."


class Why(Page):
    async def show(self) -> None:
        user, item = (self.query.get(name, "") for name in ("user", "item"))
        with box("div", "row end"):
            self._user = entry("User id", self._open, value=user, hint="an id")
            self._item = entry("Item id", self._open, value=item, hint="or the beginning of a title")
            button("Ask", self._open, classes="button strong")
        body = box("div", "columns even")
        if not (user and item):
            return
        rank, sentence = await place_of(self.client, user, item)
        found: Explanation | None = None
        with suppress(NotFound):
            found = await self.client.explain(user, item, max_pairs=MAX_PAIRS)
        title = found.similarity.title if found is not None and found.similarity is not None else ""
        with body:
            with box("section", "panel", aria_label="Place"):
                with box("p", "pair"):
                    text("strong", title or item, "isolated")
                    text("span", "for", "hint")
                    text("a", user, "isolated", href=link("/user", user=user))
                text("p", sentence, "verdict" if rank else "verdict out")
                if found is None:
                    text("p", "No index serves this item, so it has no score.", "hint")
                elif found.state_source == "none":
                    text("p", "Nothing is known of this user: they get popular items, which are not scored.", "hint")
                else:
                    _score(found)
            if found is not None and found.state_source != "none":
                with box("div", "side"):
                    with panel("Because this user had"):
                        item_list(
                            found.history, "/why", lambda one: (f"{duration(one.age_seconds)} ago", "hint"), user=user
                        )
                    _votes(found)
                    if found.rules:
                        _rules(found)

    async def _open(self, _: str = "") -> None:
        """Open the page for an item's id, else for the item of this title, or the most popular one that begins so."""
        user_id, item_id = (one.strip() for one in await typed(self._user, self._item))
        if not (user_id and item_id):
            return
        try:
            await self.client.get_item(item_id)
        except NotFound:
            found = [one.item for one in (await self.client.list_items(item_id, page_size=50)).items]
            item_id = max(found, key=lambda one: one.title == item_id).item_id if found else item_id
        ui.navigate.to(link("/why", user=user_id, item=item_id))


def _score(found: Explanation) -> None:
    shares = (found.share_of_model, found.share_of_refreshed, found.share_of_votes)
    text("p", f"Score {found.score:.3f}, made of:")
    with box("div", "bar", aria_hidden="true"):
        for (kind, _, _), share in zip(PARTS, shares, strict=True):
            box("span", f"part {kind}").style(f"flex-grow: {max(share, 0.0):.4f}")
    with box("ul", "plain legend"):
        for (kind, name, means), share in zip(PARTS, shares, strict=True):
            with box("li"):
                box("span", f"dot {kind}", aria_hidden="true")
                text("strong", f"{share:.0%}")
                text("span", name)
                text("span", means, "hint")
    similarity = found.similarity
    if similarity is None:
        return
    since = f"{similarity.num_interactions:,} interaction{'s' * (similarity.num_interactions != 1)} since training"
    text("p", f"This item's state: {since}, and the model with a weight of {similarity.model_share:.0%}.", "hint")
    with folded("The numbers: components of user and item"):
        pairs = map(
            attrgetter("query_component", "item_component", "weight", "cosine", "contribution"), similarity.pairs
        )
        rows = [(str(user), str(item), *(f"{one:.3f}" for one in numbers)) for user, item, *numbers in pairs]
        table(("User's", "Item's", "Weight", "Cosine", "Adds"), rows)


def _votes(found: Explanation) -> None:
    votes = found.votes
    with panel("Who votes"):
        if votes is None or not votes.voters:
            text("p", "No remembered interaction of people like this one is with this item.", "hint")
            if votes is not None and votes.vote:
                text("p", f"Neighbours of the items that this user had vote {votes.vote:+.3f}.")
            return
        text("p", f"Of the {votes.num_neighbours:,} remembered interactions of people most like this one:", "hint")
        texts(map(_voter, votes.voters), "")


def _voter(one: VotingInteractions) -> str:
    many = f"{one.count:,} of type {one.type}" if one.count != 1 else f"one of type {one.type}"
    return f"{many}, the newest {duration(one.newest_age_seconds)} ago: adds {one.vote:+.3f} to the vote"


def _rules(found: Explanation) -> None:
    with panel("Rules that name it"):
        texts(map(_effects, found.rules))
        text("p", f"With them the score is {found.score_with_rules:.3f}.")


def _effects(rule: ExplainedRule) -> str:
    effects = [f"adds {rule.adds:+g}"] if rule.adds else []
    effects += [f"puts the best of its items at {rule.pin}"] if rule.pin else []
    effects += [f"lets {rule.cap} of its items in"] if rule.cap else []
    return f"{rule.name}: {', '.join(effects)}"
