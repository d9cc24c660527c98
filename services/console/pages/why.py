"""Why: the parts of an item's score for a user, and its rank in the list or the reason for its absence."""

from freshet_client import AsyncClient, Explanation, Filter, NotFound, VotingInteractions
from nicegui import ui

from services.console.access import LOOK
from services.console.frame import Visit, box, button, entry, item_link, link, panel, text, typed
from services.console.sentences import duration

DEPTH, MAX_PAIRS = 1_000, 12
# The parts of a score: CSS class, name and meaning.
PARTS = (
    ("model", "Model", "what training learned of people and items"),
    ("refreshed", "Since training", "what people did with this item since training"),
    ("votes", "Votes", "remembered interactions of people and items like these"),
)


async def place_of(client: AsyncClient, user_id: str, item_id: str) -> tuple[int, str]:
    """Return the item's rank in the user's list (0: not in it), and a sentence with it or the reason."""
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


class Why:
    def __init__(self, visit: Visit) -> None:
        self._client, self._notice = visit.client, visit.notice
        self._user_id, self._item_id = (visit.query.get(name, "") for name in ("user", "item"))

        async def ask(_: str = "") -> None:
            await self._open(*await typed(user, item))

        with box("div", "row end"):
            user = entry("User id", ask, value=self._user_id, hint="an id")
            item = entry("Item id", ask, value=self._item_id, hint="or the beginning of a title")
            button("Ask", ask, classes="button strong")
        self._body = box("div", "columns even")

    async def begin(self) -> None:
        if not (self._user_id and self._item_id):
            return
        rank, sentence = await place_of(self._client, self._user_id, self._item_id)
        try:
            found = await self._client.explain(self._user_id, self._item_id, max_pairs=MAX_PAIRS)
        except NotFound:
            found = None
        self._show(rank, sentence, found)

    async def _open(self, user_id: str, item: str) -> None:
        """Open the page for an item's id, else for the item of this title, or the most popular one that begins so."""
        user_id, item_id = user_id.strip(), item.strip()
        if not (user_id and item_id):
            return
        with self._notice.failures():
            try:
                await self._client.get_item(item_id)
            except NotFound:
                found = [one.item for one in (await self._client.list_items(item_id, page_size=50)).items]
                item_id = max(found, key=lambda one: one.title == item_id).item_id if found else item_id
            ui.navigate.to(link("/why", user=user_id, item=item_id))

    def _show(self, rank: int, sentence: str, found: Explanation | None) -> None:
        title = found.similarity.title if found is not None and found.similarity is not None else ""
        with self._body:
            with box("section", "panel", aria_label="Place"):
                with box("p", "pair"):
                    text("strong", title or self._item_id, "isolated")
                    text("span", "for", "hint")
                    text("a", self._user_id, "isolated", href=link("/user", user=self._user_id))
                text("p", sentence, "verdict" if rank else "verdict out")
                if found is None:
                    text("p", "No index serves this item, so it has no score.", "hint")
                elif found.state_source == "none":
                    text("p", "Nothing is known of this user: they get popular items, which are not scored.", "hint")
                else:
                    _score(found)
            if found is not None and found.state_source != "none":
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
                numbers = (f"{one:.3f}" for one in (pair.weight, pair.cosine, pair.contribution))
                with box("tr"):
                    for value in (pair.query_component, pair.item_component, *numbers):
                        text("td", str(value))


def _because(found: Explanation, user_id: str) -> None:
    with panel("Because this user had"), box("ol", "plain"):
        for past in found.history:
            with box("li", "pair"):
                item_link(past, "/why", user=user_id)
                text("span", f"{duration(past.age_seconds)} ago", "hint")


def _votes(found: Explanation) -> None:
    votes = found.votes
    with panel("Who votes"):
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
    return f"{many}, the newest {duration(one.newest_age_seconds)} ago: adds {one.vote:+.3f} to the vote"


def _rules(found: Explanation) -> None:
    if not found.rules:
        return
    with panel("Rules that name it"):
        with box("ul", "plain"):
            for rule in found.rules:
                effects = [f"adds {rule.adds:+g}"] if rule.adds else []
                effects += [f"puts the best of its items at {rule.pin}"] if rule.pin else []
                effects += [f"lets {rule.cap} of its items in"] if rule.cap else []
                text("li", f"{rule.name}: {', '.join(effects)}", "isolated")
        text("p", f"With them the score is {found.score_with_rules:.3f}.")
