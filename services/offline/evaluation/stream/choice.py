"""Which settings a stream is walked with, chosen on held-out time: the last fifth of the training part.

Every ranker's settings are chosen by the same walk, baselines' included; nothing of the stream that is reported on
has happened yet. Baselines are chosen for what they are compared on, new items' hit rate@50. XS is there to find new
items and must not harm the rest: of the settings that find them clearly better than both baselines, the one with the
best mean reciprocal rank over all events; where none does, the one that finds them best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.policy import FeedbackPolicy, SharePolicy
from services.algorithms.pefa.share_choice import new_item_length
from services.offline.evaluation.stream.baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.offline.evaluation.stream.measures import METRICS, columns, kinds, own_rates
from services.offline.evaluation.stream.models import StreamModel, TrainedModels
from services.offline.evaluation.stream.pefa import Feedback, RefreshedItems, Refreshing, VoteSettings, WithVotes
from services.offline.evaluation.stream.walk import EventBatch, Ranker, Scores, StreamSetting, walk

Row = dict[str, Any]

MIN_USERS = 3
_KINDS = {"all": "all", "new items, from their 3rd interaction": "new", "items of the training": "known"}
_FEEDBACK = ("*:1", "rating:0.5@3,*:1", "rating:0.25@1,*:1")
# lambda of the model's items, and of new ones; the first two and the first are tried with every feedback.
_SHARES = (
    "frozen",
    "default",
    "evidence(prior=30)",
    "evidence(prior=100)",
    "evidence(prior=300)",
    "evidence(prior=1000)",
    "evidence(prior=100,half_life=30d)",
    "fixed(least=0.9)",
    "fixed(least=0.7)",
    "fixed(least=0.5)",
)
_NEW_SHARES = (
    "evidence(prior=3)",
    "new_item",
    "evidence(prior=0.5)",
    "evidence(prior=1)",
    "evidence(prior=5)",
    "evidence(prior=10)",
    "evidence(prior=1,least=0.2)",
    "evidence(prior=2,least=0.2)",
    "evidence(prior=1,least=0.4)",
    "evidence(prior=3,least=0.4)",
    "fixed(least=0)",
)
# The closed form's length of a new item, reached after about this many like-minded interactions.
_CLOSED_FORM_PRIORS = (0.5, 3.0)
_MODEL_SHARES = (0.9, 0.7, 0.5, 0.3, 0.15)
_VOTERS = (16, 32, 64)
_CAPACITY = 50_000
# Held-out time is not the stream: new items have to be found this much better than by either baseline.
_MARGIN = 1.2
_HALF_LIVES: tuple[float | None, ...] = (None, 20_000, 5_000, 1_000)
_NEIGHBOUR_SETTINGS = tuple(
    NeighbourSettings(window=window, recency=recency, damping=damping, shrink=2.0)
    for window, recency in ((10, 0.8), (50, 0.95))
    for damping in (0.5, 0.8)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """How each ranker is set up."""

    feedback: Feedback
    share: SharePolicy
    new_share: SharePolicy
    votes: VoteSettings
    capacity: int
    min_users: int
    half_life_events: float | None
    neighbours: NeighbourSettings

    def as_plain(self) -> Row:
        """As plain values, policies as `parse` reads them."""
        return {
            "feedback": self.feedback.policy.text,
            "feedback before the stream": self.feedback.from_past,
            "XS share": self.share.text,
            "XS share of new items": self.new_share.text,
            "XL": asdict(self.votes) | {"capacity": self.capacity},
            "distinct users": self.min_users,
            "popularity half-life, events": self.half_life_events,
            "item-kNN": asdict(self.neighbours),
        }


def choose(
    setting: StreamSetting, model: StreamModel, *, predict_every: int, say: Callable[[str], None]
) -> tuple[Policies, list[Row]]:
    """Walk a held-out stream with every setting; return the best of each ranker, and what was tried.

    `model` must have encoded what came before the stream as well.
    """
    trial = _Trial(setting, model, predict_every, say)
    half_lives = {f"half-life {events or 'for ever'}": events for events in _HALF_LIVES}
    popularity = trial.walk(
        "popularity",
        [StreamingPopularity(setting, half_life_events=events, name=name) for name, events in half_lives.items()],
    )
    neighbours = {one.text: one for one in _NEIGHBOUR_SETTINGS}
    item_knn = trial.walk(
        "item-kNN", [StreamingItemNeighbours(setting, one, name=name) for name, one in neighbours.items()]
    )
    bar = _MARGIN * max(float(row["new hr@50"]) for row in [*popularity, *item_knn])
    sources = {text: Feedback(policy=FeedbackPolicy.parse(text)) for text in _FEEDBACK}
    # What happened before the stream was what the model was trained on; does it say something once more?
    sources |= {f"{_FEEDBACK[0]}; from the past": replace(sources[_FEEDBACK[0]], from_past=True)}
    first = _pairs(_SHARES[:2], _NEW_SHARES[:1])
    observed = _Observed(setting, model, sources[_FEEDBACK[0]])
    by_feedback = trial.walk(
        "XS, feedback",
        [
            observed,
            *(
                RefreshedItems(setting, model, own, {f"{source} with {name}": pair for name, pair in first.items()})
                for source, own in sources.items()
            ),
        ],
    )
    feedback = sources[trial.best_beyond(bar, by_feedback).split(" with ")[0]]
    pairs = _pairs(_SHARES, [*_NEW_SHARES, *observed.closed_forms()])
    refreshing = pairs[trial.best_beyond(bar, trial.walk("XS", [RefreshedItems(setting, model, feedback, pairs)]))]
    votes = {f"; lambda {share:g}, k {k}": VoteSettings(k=k, share=share) for share in _MODEL_SHARES for k in _VOTERS}
    frozen = TrainedModels(setting, [model], name="frozen")
    voting = WithVotes(setting, model, feedback, votes, [frozen], capacity=_CAPACITY, min_users=MIN_USERS)
    xl = trial.walk("XL", [voting])
    best_votes = trial.best([row for row in xl if row["setting"] != "frozen"], "all mrr")
    policies = Policies(
        feedback=feedback,
        share=refreshing.share,
        new_share=refreshing.new_share,
        votes=votes[best_votes.removeprefix("frozen")],
        capacity=_CAPACITY,
        min_users=MIN_USERS,
        half_life_events=half_lives[trial.best(popularity, "new hr@50")],
        neighbours=neighbours[trial.best(item_knn, "new hr@50")],
    )
    return policies, trial.rows


def _pairs(shares: Sequence[str], new_shares: Sequence[str]) -> dict[str, Refreshing]:
    """Every lambda of the model's items with every one of new items."""
    return {
        f"{share}, new {new_share}": Refreshing(
            share=SharePolicy.parse(share), new_share=SharePolicy.parse(new_share), min_users=MIN_USERS
        )
        for share in shares
        for new_share in new_shares
    }


class _Observed(RefreshedItems):
    """Sums as XS keeps them, asked before each step how long a new item may be; it ranks nothing."""

    def __init__(self, setting: StreamSetting, model: StreamModel, feedback: Feedback) -> None:
        super().__init__(setting, model, feedback, {})
        self._similarities: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = []

    def step(self, batch: EventBatch) -> Mapping[str, Scores]:
        self._similarities.append(self.held_out_similarities(batch))
        super().step(batch)
        return {}

    def closed_forms(self) -> list[str]:
        """New items' lambda under which they score as known ones do, as texts; none where nothing was observed."""
        model, memory = (np.concatenate(parts) for parts in zip(*self._similarities, strict=True))
        if not len(model) or memory.mean() <= 0:
            return []
        least = 1.0 - new_item_length(model, memory)
        return [SharePolicy(prior=prior, least=least).text for prior in _CLOSED_FORM_PRIORS]


class _Trial:
    """Walks of one held-out stream; `rows` is everything tried."""

    def __init__(
        self, setting: StreamSetting, model: StreamModel, predict_every: int, say: Callable[[str], None]
    ) -> None:
        self._setting, self._model, self._every, self._say = setting, model, predict_every, say
        self.rows: list[Row] = []

    def walk(self, ranker: str, tried: Sequence[Ranker]) -> list[Row]:
        """A row per name that the rankers give."""
        walked = walk(
            self._setting,
            tried,
            predict_every=self._every,
            progress=lambda done: self._say(f"choosing {ranker}: {done:,} of {self._setting.num_streamed:,} events"),
        )
        masks = kinds(columns(self._setting, walked.places, self._model.predictable(walked.places)))
        rows: list[Row] = []
        for name, ranks in walked.ranks.items():
            row: Row = {"contender": ranker, "setting": name.strip("; "), "chosen": False, "events": len(ranks)}
            for kind, short in _KINDS.items():
                found = own_rates(ranks, masks[kind])
                row |= {f"{short} {metric}": found.get(metric, 0.0) for metric in METRICS}
            rows.append(row)
        self.rows += rows
        return rows

    @staticmethod
    def best(rows: Sequence[Row], field: str) -> str:
        """The setting with the most of `field`, the first of equals; marked as chosen."""
        found = max(rows, key=lambda row: float(row[field]))
        found["chosen"] = True
        return str(found["setting"])

    def best_beyond(self, bar: float, rows: Sequence[Row]) -> str:
        """Of the settings whose new items' HR@50 passes `bar` the one with the best MRR, else the best at new items."""
        beyond = [row for row in rows if row["new hr@50"] > bar]
        return self.best(beyond, "all mrr") if beyond else self.best(rows, "new hr@50")
