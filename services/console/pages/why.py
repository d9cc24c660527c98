"""Why: the parts of an item's score for a user, and its rank in the list or the reason for its absence."""

from dataclasses import dataclass

from freshet_client import AsyncClient, Explanation, Filter, NotFound, VotingInteractions
from nicegui import ui

from services.console.access import LOOK, Access
from services.console.frame import Visit, add_page, box, button, entry, text
from services.console.links import user_link, why_link
from services.console.sentences import duration

PATH = "/why"
DEPTH, MAX_PAIRS = 1_000, 12
# The parts of a score: CSS class, name and meaning.
PARTS = (
    ("model", "Model", "what training learned of people and items"),
    ("refreshed", "Since training", "what people did with this item since training"),
    ("votes", "Votes", "remembered interactions of people and items like these"),
)


@dataclass(frozen=True, slots=True)
class ItemRank:
    """The item's rank in the user's list (0: not in it), and a sentence about it."""

    rank: int
    sentence: str


async def place_of(client: AsyncClient, user_id: str, item_id: str) -> ItemRank:
    """Ask for the list, then for the item alone, then with seen items, until the reason for its absence is clear."""
    ranked = (await client.recommend(user_id, DEPTH, context=LOOK)).item_ids
    if item_id in ranked:
        rank = ranked.index(item_id) + 1
        return ItemRank(rank, f"It is number {rank:,} of this user's list now.")
    alone = Filter(allow_item_ids=[item_id])
    if (await client.recommend(user_id, 1, filter=alone, context=LOOK)).items:
        return ItemRank(0, f"It may be answered, and {len(ranked):,} items score higher.")
    alone = Filter(allow_item_ids=[item_id], exclude_seen=False)
    if (await client.recommend(user_id, 1, filter=alone, context=LOOK)).items:
        return ItemRank(0, "It is left out: this user had it already, and seen items do not come again.")
    return ItemRank(0, "It is left out: it is withdrawn, not available, or unknown to the catalogue.")


def add(access: Access) -> None:
    """Add the page."""

    lead = "Why somebody gets an item, or does not."
    add_page(access, PATH, "Why", lead, lambda visit: Why(visit).begin())


class Why:
    """One tab's page."""

    def __init__(self, visit: Visit) -> None:
        self._client, self._notice = visit.client, visit.notice
        self._user_id, self._item_id = (visit.query.get(name, "") for name in ("user", "item"))
        with box("div", "row end"):
            user = entry("User id", lambda said: self._open(said, self._item_id), value=self._user_id, hint="an id")
            item = entry("Item id", lambda said: self._open(self._user_id, said), value=self._item_id, hint="an id")

            async def pressed() -> None:
                script = f"[getElement({user.id}).value, getElement({item.id}).value]"
                self._open(*await ui.run_javascript(script))

            button("Ask", pressed, classes="button strong")
        self._body = box("div", "columns even")

    async def begin(self) -> None:
        """Fetch the item's rank and score, and show them, if the address names a user and an item."""
        if not (self._user_id and self._item_id):
            return
        with self._notice.failures():
            place = await place_of(self._client, self._user_id, self._item_id)
            try:
                found = await self._client.explain(self._user_id, self._item_id, max_pairs=MAX_PAIRS)
            except NotFound:
                found = None
            self._show(place, found)

    def _open(self, user_id: str, item_id: str) -> None:
        self._user_id, self._item_id = user_id.strip(), item_id.strip()
        if self._user_id and self._item_id:
            ui.navigate.to(why_link(self._user_id, self._item_id))

    def _show(self, place: ItemRank, found: Explanation | None) -> None:
        title = found.similarity.title if found is not None and found.similarity is not None else ""
        with self._body:
            with box("section", "panel", aria_label="Place"):
                with box("p", "pair"):
                    text("strong", title or self._item_id, "isolated")
                    text("span", "for", "hint")
                    text("a", self._user_id, "isolated", href=user_link(self._user_id))
                text("p", place.sentence, "verdict" if place.rank else "verdict out")
                if found is None:
                    text("p", "No index serves this item, so it has no score.", "hint")
                elif found.state_source == "none":
                    text("p", "Nothing is known of this user: they get popular items, which are not scored.", "hint")
                else:
                    _score(found)
            if found is None or found.state_source == "none":
                return
            with box("div", "side"):
                _because(found, self._user_id)
                _votes(found)
                _rules(found)


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
    with box("details", "code"):
        text("summary", "The numbers: components of user and item")
        with box("table", "numbers"), box("tbody"):
            with box("tr"):
                for name in ("User's", "Item's", "Weight", "Cosine", "Adds"):
                    text("th", name, scope="col")
            for pair in similarity.pairs:
                with box("tr"):
                    for value in (pair.query_component, pair.item_component):
                        text("td", str(value))
                    for number in (pair.weight, pair.cosine, pair.contribution):
                        text("td", f"{number:.3f}")


def _because(found: Explanation, user_id: str) -> None:
    with box("section", "panel", aria_label="Because this user had"):
        text("h2", "Because this user had")
        with box("ol", "plain"):
            for past in found.history:
                with box("li", "pair"):
                    text("a", past.title or past.item_id, "isolated", href=why_link(user_id, past.item_id))
                    text("span", f"{duration(past.age_seconds)} ago", "hint")


def _votes(found: Explanation) -> None:
    with box("section", "panel", aria_label="Who votes"):
        text("h2", "Who votes")
        votes = found.votes
        if votes is None or not votes.voters:
            text("p", "No remembered interaction of people like this one is with this item.", "hint")
            if votes is not None and votes.vote:
                text("p", f"Neighbours of the items that this user had vote {votes.vote:+.3f}.")
            return
        text("p", f"Of the {votes.num_neighbours:,} remembered interactions of people most like this one:", "hint")
        with box("ul", "plain"):
            for one in votes.voters:
                text("li", _voter(one))


def _voter(one: VotingInteractions) -> str:
    many = f"{one.count:,} of type {one.type}" if one.count != 1 else f"one of type {one.type}"
    ages = f"the newest {duration(one.newest_age_seconds)} ago"
    return f"{many}, {ages}: adds {one.vote:+.3f} to the vote"


def _rules(found: Explanation) -> None:
    if not found.rules:
        return
    with box("section", "panel", aria_label="Rules"):
        text("h2", "Rules that name it")
        with box("ul", "plain"):
            for rule in found.rules:
                effects = [f"adds {rule.adds:+g}"] if rule.adds else []
                effects += [f"puts the best of its items at {rule.pin}"] if rule.pin else []
                effects += [f"lets {rule.cap} of its items in"] if rule.cap else []
                text("li", f"{rule.name}: {', '.join(effects)}", "isolated")
        text("p", f"With them the score is {found.score_with_rules:.3f}.")
