"""Choose the head by short trainings of each candidate, evaluated on each user's last training event.

Candidates get equal processor time, because a position costs a mixture several times as much as a dot product. Item
neighbours are included, so that a head gets no credit for hits that neighbours find anyway. Of the heads that are not
significantly worse than the best, the cheapest to serve is chosen.

Letters: E validation events.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EventSchema
from services.offline.datasets import Interactions, leave_one_out_split
from services.offline.evaluation.engine.intervals import Estimate, paired_difference
from services.offline.evaluation.engine.metrics import Ranks, gains
from services.offline.evaluation.engine.ranked_events import counting, evenly, rank_events
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import train
from services.offline.training.neighbours import choosing_rows, learn_neighbours, ranks_by_share
from services.offline.training.presets import TrainConfig, with_dot_head, with_wide_dot_head

# A candidate's share of the full training's epochs. In a short training a third ranks the heads as all epochs do; in a
# long training the mixture improves later (docs/benchmarks/quality.md).
_SHARE = 1 / 3
_EVENTS = 4_000
_METRIC = "ndcg@10"
# A position's cost is the mean over about this many positions, after the warm-up batches.
_MEASURED_POSITIONS, _WARM_UP_BATCHES = 30_000, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen candidate; `config` has the epochs that fill the mixture's processor time.

    `ndcg_at_10`: every candidate's validation score. `lead`: NDCG@10 of the best mixture minus that of the best dot
    product, with an interval over users.
    """

    name: str
    config: TrainConfig
    ndcg_at_10: Mapping[str, float]
    reason: str
    lead: Estimate
    cpu_seconds: float


def candidates(config: TrainConfig) -> dict[str, TrainConfig]:
    """Return the candidates of a preset's configuration (with a mixture) by name, each with its best-known loss."""
    sampled = replace(config, loss="corrected-softmax")
    return {
        "mol": sampled,
        "dot": with_dot_head(sampled),
        "dot, full softmax": replace(with_dot_head(config), loss="full-softmax"),
        "wide dot": with_wide_dot_head(sampled),
    }


def microseconds_per_position(config: TrainConfig, interactions: Interactions, device: str = "cpu") -> float:
    """Return the processor time of all threads per position, measured on a training's first batches."""
    users = int(np.count_nonzero(interactions.user_counts()))
    batches = math.ceil(_MEASURED_POSITIONS * users / len(interactions) / config.batch_sequences)
    marks = [(time.process_time(), 0)]
    train(
        config,
        interactions,
        device=device,
        stop_after_batches=_WARM_UP_BATCHES + batches,
        progress=lambda step: marks.append((time.process_time(), step.positions)),
    )
    (began, warm), (ended, all_positions) = marks[min(_WARM_UP_BATCHES, len(marks) - 2)], marks[-1]
    return 1e6 * (ended - began) / (all_positions - warm)


def choose(
    options: Mapping[str, TrainConfig],
    interactions: Interactions,
    schema: EventSchema,
    *,
    on_candidate: Callable[[str], None] = lambda name: None,
    device: str = "cpu",
    cost: Callable[[TrainConfig, Interactions, str], float] = microseconds_per_position,
) -> Choice:
    """Train every option on all but each user's last event, and rank those events as served.

    The most expensive mixture trains for a third of its epochs. Every other option gets the same processor time, by
    `cost` (microseconds per position).
    Raises: ValueError if no user has three events with a positive last one.
    """
    parts = leave_one_out_split(interactions)
    last = counting(interactions, parts.test_rows, schema)
    if not len(last):
        raise ValueError(
            f"{interactions.name}: no user has three events of which the last one counts by the event schema; choosing "
            "a head needs one to be predicted"
        )
    known = interactions.select(parts.refit_rows)
    rows = evenly(last, _EVENTS)
    taken = known if known.outcomes is None else known.select(known.outcomes == 0)
    neighbours = learn_neighbours(taken) if len(choosing_rows(interactions, schema)) else None
    began = time.process_time()
    costs = {name: cost(config, known, device) for name, config in options.items()}
    spent = time.process_time() - began
    mixtures = [name for name, config in options.items() if config.head.is_mixture]
    dearest = max(mixtures, key=lambda name: options[name].epochs * costs[name])
    epochs = options[dearest].epochs
    found: dict[str, npt.NDArray[np.float64]] = {}
    for name, config in options.items():
        share = costs[dearest] / costs[name]
        short = replace(config, epochs=_at_least_one(_at_least_one(epochs * _SHARE) * share))
        on_candidate(f"{name}: {short.epochs} epochs at {costs[name]:.0f} µs of processor time per position")
        report = train(short, known, device=device)
        report.model.to("cpu")
        scorer = ModelScorer(report.model, report.user_index)
        if neighbours is None:
            found[name] = gains(rank_events(scorer, interactions, rows).ranks, _METRIC)
        else:
            found[name] = _served_gains(ranks_by_share(scorer, neighbours, interactions, rows))
        spent += report.cpu_seconds
    means = {name: float(values.mean()) for name, values in found.items()}
    mixture, dot = (
        max((name for name in options if (name in mixtures) is wanted), key=means.__getitem__)
        for wanted in (True, False)
    )
    chosen, reason = _cheapest_of_the_best(options, found)
    return Choice(
        name=chosen,
        config=replace(options[chosen], epochs=_at_least_one(epochs * costs[dearest] / costs[chosen])),
        ndcg_at_10=means,
        reason=reason,
        lead=_difference(found, mixture, dot),
        cpu_seconds=spent,
    )


def _cheapest_of_the_best(
    options: Mapping[str, TrainConfig], found: Mapping[str, npt.NDArray[np.float64]]
) -> tuple[str, str]:
    """Return, of the options that are not significantly worse than the best, the cheapest to serve, and the reason."""
    best = max(options, key=lambda name: found[name].mean())
    # A wide dot product has the mixture's bytes, but no gate to compute.
    order = sorted(
        options,
        key=lambda name: (options[name].head.is_mixture, options[name].head.component_width, -found[name].mean()),
    )
    chosen = next(name for name in order if name == best or not _difference(found, best, name).is_above_zero)
    if chosen != best:
        lead = _difference(found, best, chosen)
        return chosen, f"no difference beyond doubt ({best} minus {chosen} {lead}), and it is cheaper to serve"
    return best, "the best, and none is cheaper to serve" if best == order[
        0
    ] else "beyond doubt better than all cheaper"


def _difference(found: Mapping[str, npt.NDArray[np.float64]], one: str, other: str) -> Estimate:
    return paired_difference(found[one][None], found[other][None])


def _at_least_one(epochs: float) -> int:
    return max(1, round(epochs))


def _served_gains(ranks: Mapping[float, Ranks]) -> npt.NDArray[np.float64]:
    """Return gains (E,); each half of the events uses the neighbours' share that is best on the other half."""
    by_share = gains(np.stack(list(ranks.values())), _METRIC)
    is_odd = np.arange(by_share.shape[1]) % 2 == 1
    served: npt.NDArray[np.float64] = by_share[0].copy()
    for half in (is_odd, ~is_odd):
        served[half] = by_share[by_share[:, ~half].sum(axis=1).argmax(), half]
    return served
