"""`freshet compare`: two bundles of one catalogue on events that neither was trained on.

Letters: E events.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.offline.datasets import TableOptions
from services.offline.evaluation.bundles.evaluate import beyond_accuracy, segments
from services.offline.evaluation.bundles.judged import Data, judged_by
from services.offline.evaluation.engine.intervals import estimates, holm, paired_difference
from services.offline.evaluation.engine.metrics import METRICS, gains
from services.offline.evaluation.engine.ranked_events import RankedEvents, evenly, rank_events
from services.offline.evaluation.engine.served_scorer import ServedScorer
from services.offline.evaluation.engine.strata import strata
from services.offline.training.sequences import Histories

# Number of users in the report, of shown events per user, and of shown answers per user and bundle.
PEOPLE, _HISTORY, _ANSWERS = 20, 3, 5
# A segment differs if its p-value (Holm) is below this.
LEVEL = 0.05

_AS_USUAL = TableOptions()
Report = dict[str, Any]


def compare(
    a: Path, b: Path, data: Data, *, table: TableOptions = _AS_USUAL, say: Callable[[str], None] = lambda line: None
) -> Report:
    """Return a report of plain values.

    `metrics` and `b_minus_a` have intervals over users; `people` shows both bundles' answers to some users.
    Raises: ValueError for bundles of different catalogues, and as `judged_by`; BundleError.
    """
    bundles = {"a": load_bundle(a), "b": load_bundle(b)}
    _require_one_catalogue(*bundles.values())
    judged = judged_by(list(bundles.values()), data, table=table, say=say)
    split = judged.split
    ranked: dict[str, RankedEvents] = {}
    for name, bundle in bundles.items():
        say(f"ranking {len(split.test_rows):,} events: {bundle.path}")
        ranked[name] = rank_events(ServedScorer(bundle, split.interactions), split.interactions, split.test_rows)
    users = ranked["a"].users
    ranks = {name: found.ranks for name, found in ranked.items()}
    kinds = segments(split, ranked["a"], ranks, minus="a")
    masks = {(question, kind): mask for question, kind, mask in strata(split, ranked["a"])}
    segment_masks = {number: masks[row["question"], row["segment"]] for number, row in enumerate(kinds)}
    hits = {name: gains(found[None], "hr@10") for name, found in ranks.items()}
    p_values = {
        number: paired_difference(hits["b"][:, mask], hits["a"][:, mask], users=users[mask]).p_value
        for number, mask in segment_masks.items()
    }
    for number, adjusted in holm(p_values).items():
        kinds[number] |= {"p_value": round(adjusted, 5), "differs": adjusted < LEVEL}
    return {
        **{
            name: {"bundle": str(bundle.path), "model_version": bundle.model_version}
            for name, bundle in bundles.items()
        },
        "data": split.interactions.name,
        "note": judged.note,
        "events": len(users),
        "users": len(np.unique(users)),
        "metrics": estimates(ranks, users, METRICS),
        "b_minus_a": estimates(ranks, users, METRICS, minus="a")["b"],
        "recommended": {name: beyond_accuracy(split, found) for name, found in ranked.items()},
        "segments": kinds,
        "people": _people(bundles["a"], split.interactions, ranked),
    }


def _require_one_catalogue(a: Bundle, b: Bundle) -> None:
    if a.item_ids == b.item_ids:
        return
    mine, theirs = set(a.item_ids), set(b.item_ids)
    only = [sorted(mine - theirs), sorted(theirs - mine)]
    if not only[0] and not only[1]:
        return
    described = [
        f"{len(items):,} items are only in {bundle.path}" + (f" ({', '.join(items[:3])}, ...)" if items else "")
        for bundle, items in zip((a, b), only, strict=True)
    ]
    raise ValueError(
        f"the bundles have different catalogues: {' and '.join(described)}; allowed: two bundles of the same items, "
        "since ranks in different catalogues are not comparable"
    )


def _people(bundle: Bundle, data: Any, ranked: dict[str, RankedEvents]) -> list[dict[str, Any]]:
    histories, users = Histories.of(data), ranked["a"].users
    last = np.flatnonzero(np.append(np.diff(users) != 0, True))
    names = [title or item_id for title, item_id in zip(data.titles, data.item_ids, strict=True)]
    found = []
    for row in evenly(last, PEOPLE).tolist():
        event, user = int(ranked["a"].events[row]), int(users[row])
        begin = max(int(histories.offsets[user]), event - _HISTORY)
        person: dict[str, Any] = {
            "user": data.user_ids[user],
            "had": [names[item] for item in histories.items[begin:event].tolist()],
            "took": names[histories.items[event]],
        }
        for name, one in ranked.items():
            assert one.first is not None
            answers = [names[item] for item in one.first[row, :_ANSWERS].tolist() if item >= 0]
            person[name] = {"rank": int(one.ranks[row]) + 1, "first": answers}
        found.append(person)
    return found
