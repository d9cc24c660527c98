"""Which settings a stream is walked with, chosen on held-out time: the last fifth of the training part.

Every contender's settings are chosen by the same walk, baselines' included; nothing of the stream that is reported on
has happened yet. PEFA's are chosen for the mean reciprocal rank over all events, which new items are part of.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.algorithms.pefa.policy import FeedbackPolicy, SharePolicy
from services.evaluation.stream_baselines import NeighbourSettings, StreamingItemNeighbours, StreamingPopularity
from services.evaluation.stream_measures import METRICS, chosen, columns, kinds
from services.evaluation.stream_models import StreamModel, TrainedModels
from services.evaluation.stream_pefa import Feedback, RefreshedItems, Refreshing, VoteSettings, WithVotes
from services.evaluation.stream_setting import StreamSetting
from services.evaluation.stream_walk import Contender, walk

Row = dict[str, Any]

MIN_USERS = 3
_KINDS = {"all": "all", "new items, from their 3rd interaction": "new", "items of the training": "known"}
_FEEDBACK = ("*:1", "rating:0.5@3,*:1", "rating:0.25@1,*:1")
_SHARES = (
    "fixed(least=0.9)",
    "fixed(least=0.5)",
    "evidence(prior=10)",
    "evidence(prior=100)",
    "evidence(prior=1000)",
    "frozen",
)
_MODEL_SHARES = (0.95, 0.9, 0.7, 0.5)
_VOTERS = (16, 64, 256)
_CAPACITY = 50_000
_HALF_LIVES: tuple[float | None, ...] = (None, 20_000, 5_000, 1_000)
_NEIGHBOUR_SETTINGS = tuple(
    NeighbourSettings(window=window, recency=recency, damping=damping, shrink=2.0)
    for window, recency in ((10, 0.8), (50, 0.95))
    for damping in (0.5, 0.8)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """How each contender is set up."""

    feedback: Feedback
    share: SharePolicy
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
            "XL": asdict(self.votes) | {"capacity": self.capacity},
            "distinct users": self.min_users,
            "popularity half-life, events": self.half_life_events,
            "item-kNN": asdict(self.neighbours),
        }


def choose(
    setting: StreamSetting, model: StreamModel, *, predict_every: int, say: Callable[[str], None]
) -> tuple[Policies, list[Row]]:
    """Walk a held-out stream with every setting; return the best of each contender, and what was tried.

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
    sources = {
        f"{text}{'; from the past' if past else ''}": Feedback(policy=FeedbackPolicy.parse(text), from_past=past)
        for text in _FEEDBACK
        for past in (False, True)
    }
    shares = {text: SharePolicy.parse(text) for text in _SHARES}
    xs = trial.walk(
        "XS",
        [
            RefreshedItems(
                setting,
                model,
                feedback,
                {
                    f"{source} with {text}": Refreshing(share=share, min_users=MIN_USERS)
                    for text, share in shares.items()
                },
            )
            for source, feedback in sources.items()
        ],
    )
    best_source, best_share = trial.best(xs, "all mrr").split(" with ")
    feedback = sources[best_source]
    votes = {f"; lambda {share:g}, k {k}": VoteSettings(k=k, share=share) for share in _MODEL_SHARES for k in _VOTERS}
    frozen = TrainedModels(setting, [model], name="frozen")
    voting = WithVotes(setting, model, feedback, votes, [frozen], capacity=_CAPACITY, min_users=MIN_USERS)
    xl = trial.walk("XL", [voting])
    best_votes = trial.best([row for row in xl if row["setting"] != "frozen"], "all mrr")
    policies = Policies(
        feedback=feedback,
        share=shares[best_share],
        votes=votes[best_votes.removeprefix("frozen")],
        capacity=_CAPACITY,
        min_users=MIN_USERS,
        half_life_events=half_lives[trial.best(popularity, "new hr@50")],
        neighbours=neighbours[trial.best(item_knn, "new hr@50")],
    )
    return policies, trial.rows


class _Trial:
    """Walks of one held-out stream; `rows` is everything tried."""

    def __init__(
        self, setting: StreamSetting, model: StreamModel, predict_every: int, say: Callable[[str], None]
    ) -> None:
        self._setting, self._model, self._every, self._say = setting, model, predict_every, say
        self.rows: list[Row] = []

    def walk(self, contender: str, tried: list[Contender]) -> list[Row]:
        """A row per name that the contenders give."""
        walked = walk(
            self._setting,
            tried,
            predict_every=self._every,
            progress=lambda done: self._say(f"choosing {contender}: {done:,} of {self._setting.num_streamed:,} events"),
        )
        predictable = np.zeros(self._setting.num_streamed, dtype=bool)
        predictable[walked.places[self._model.queries(walked.places)[0]]] = True
        masks = kinds(chosen(columns(self._setting, predictable), walked.places))
        rows: list[Row] = []
        for name, ranks in walked.ranks.items():
            row: Row = {"contender": contender, "setting": name.strip("; "), "chosen": False, "events": len(ranks)}
            for kind, short in _KINDS.items():
                for metric, gain in METRICS.items():
                    gains = gain(ranks[masks[kind]])
                    row[f"{short} {metric}"] = round(float(gains.mean()), 5) if len(gains) else 0.0
            rows.append(row)
        self.rows += rows
        return rows

    @staticmethod
    def best(rows: list[Row], field: str) -> str:
        """The setting with the most of `field`, the first of equals; marked as chosen."""
        found = max(rows, key=lambda row: float(row[field]))
        found["chosen"] = True
        return str(found["setting"])
