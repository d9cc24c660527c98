"""Which head to train: short trainings of each candidate, judged as served, on each user's last training event.

Item neighbours stand beside the model where the bundle will have them: what they find already is no head's merit. A
mixture costs more to train and to serve than a dot product, so it has to be better than the best dot product beyond
doubt; where the interval contains zero the dot product is chosen. It knows nothing of files or test events.

Letters: E validation events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.offline.datasets import Interactions, leave_one_out_split
from services.offline.evaluation.common.recall import Ranks
from services.offline.statistics import Difference, paired_difference
from services.offline.training.evaluation import ModelScorer, rank_events
from services.offline.training.loop import train
from services.offline.training.neighbours import choosing_rows, learn_neighbours, ranks_by_share
from services.offline.training.presets import TrainConfig, with_dot_head, with_wide_dot_head

# Of a whole training's epochs. A third orders the heads of a short training as the whole does; a long one's mixture
# gains later (docs/benchmarks/quality.md).
_SHARE = 1 / 3
_EVENTS = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`config` is the chosen candidate's, under `name`; `ndcg_at_10` is every candidate's on validation.

    `lead` is the best mixture's NDCG@10 minus the best dot product's; `cpu_seconds` is what choosing cost.
    """

    name: str
    config: TrainConfig
    ndcg_at_10: Mapping[str, float]
    lead: Difference
    cpu_seconds: float


def candidates(config: TrainConfig) -> dict[str, TrainConfig]:
    """What a preset's configuration (with a mixture) may become, by name, best-known losses each."""
    sampled = replace(config, loss="corrected-softmax")
    return {
        "mol": sampled,
        "dot": with_dot_head(sampled),
        "dot, full softmax": replace(with_dot_head(config), loss="full-softmax"),
        "wide dot": with_wide_dot_head(sampled),
    }


def choose(
    options: Mapping[str, TrainConfig],
    interactions: Interactions,
    *,
    on_candidate: Callable[[str], None] = lambda name: None,
    device: str = "cpu",
) -> Choice:
    """Train every option for a third of its epochs on all but each user's last event, and rank those as served.

    Raises: ValueError if no user has three events.
    """
    parts = leave_one_out_split(interactions)
    if not len(parts.test_rows):
        raise ValueError(f"{interactions.name}: no user has three events; choosing a head needs one to be predicted")
    known = interactions.select(parts.refit_rows)
    rows = parts.test_rows[np.linspace(0, len(parts.test_rows) - 1, min(_EVENTS, len(parts.test_rows))).astype(int)]
    taken = known if known.outcomes is None else known.select(known.outcomes == 0)
    neighbours = learn_neighbours(taken) if len(choosing_rows(interactions)) else None
    gains: dict[str, npt.NDArray[np.float64]] = {}
    spent = 0.0
    for name, config in options.items():
        short = replace(config, epochs=max(1, round(config.epochs * _SHARE)))
        on_candidate(name)
        report = train(short, known, device=device)
        report.model.to("cpu")
        scorer = ModelScorer(report.model, report.user_index)
        if neighbours is None:
            gains[name] = _gains(rank_events(scorer, interactions, rows).ranks)
        else:
            gains[name] = _served_gains(ranks_by_share(scorer, neighbours, interactions, rows))
        spent += report.cpu_seconds
    means = {name: float(values.mean()) for name, values in gains.items()}
    mixture, dot = (
        max((name for name in options if options[name].head.is_mixture is wanted), key=means.__getitem__)
        for wanted in (True, False)
    )
    lead = paired_difference(gains[mixture][None], gains[dot][None])
    chosen = mixture if lead.is_above_zero else dot
    return Choice(name=chosen, config=options[chosen], ndcg_at_10=means, lead=lead, cpu_seconds=spent)


def _served_gains(ranks: Mapping[float, Ranks]) -> npt.NDArray[np.float64]:
    """(E,) on each half of the events, with the share of item neighbours that is best on the other."""
    by_share = np.stack([_gains(found) for found in ranks.values()])
    is_odd = np.arange(by_share.shape[1]) % 2 == 1
    served: npt.NDArray[np.float64] = by_share[0].copy()
    for half in (is_odd, ~is_odd):
        served[half] = by_share[by_share[:, ~half].sum(axis=1).argmax(), half]
    return served


def _gains(ranks: Ranks) -> npt.NDArray[np.float64]:
    return np.where(ranks < 10, 1.0 / np.log2(ranks + 2.0), 0.0)
