"""lambda and k of PEFA on text, chosen on held-out training queries by recall over a grid.

Equation 8 has two readings for a document without feedback: its vector is multiplied by lambda (printed), or does not
change (served).

Letters: n documents, m training queries, B queries asked, d width, k neighbours.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import FloatArray
from services.offline.evaluation.common.recall import pair_ranks, recalls
from services.offline.evaluation.pefa.data import DECIDED_BY, Judged, TextSet, folds
from services.offline.evaluation.pefa.paper import nearest_queries, xl_scores, xl_votes, xs_passages

Method = Literal["encoder", "xs", "xl"]

SHARES = tuple(step / 10 for step in range(1, 10))
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
PAPER_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
PAPER_NEIGHBOURS = (16, 32, 64)

_FOLDS = 5
_HELD_OUT = 2_500  # held-out queries that decide; with fewer training queries, each is held out once


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A method with its lambda (`share`) and k; `printed`: whether equation 8 is read as printed."""

    method: Method
    share: float = 1.0
    k: int = 0
    printed: bool = False

    @property
    def text(self) -> str:
        """The setting as tables show it."""
        if self.method == "encoder":
            return "encoder alone"
        form = ", as printed" if self.printed else ""
        neighbours = f", k={self.k}" if self.method == "xl" else ""
        return f"{self.method.upper()} (λ={self.share:g}{neighbours}{form})"


ENCODER = Setting(method="encoder")
Recalls = dict[str, npt.NDArray[np.float64]]


def grid(shares: Sequence[float] = SHARES, neighbours: Sequence[int] = NEIGHBOURS) -> list[Setting]:
    """Return the encoder alone, XS in both readings and XL, over lambda and k."""
    return [
        ENCODER,
        *(Setting(method="xs", share=share, printed=printed) for printed in (False, True) for share in shares),
        *(Setting(method="xl", share=share, k=k) for k in neighbours for share in shares),
    ]


def xs_vectors(documents: FloatArray, train: Judged, setting: Setting) -> FloatArray:
    """Return the document vectors (n, d) that XS serves."""
    vectors = xs_passages(documents, train.queries, train.relevant(len(documents)), setting.share)
    if setting.printed:
        untouched = ~np.isin(np.arange(len(documents)), train.pairs[:, 1])
        vectors[untouched] *= np.float32(setting.share)
    return vectors


def measured(
    documents: FloatArray, train: Judged, asked: Judged, settings: Iterable[Setting]
) -> dict[Setting, Recalls]:
    """Return each query's recalls under each setting, by exact search."""
    settings = list(settings)
    relevant = train.relevant(len(documents))
    own = asked.queries @ documents.T
    found = {}
    furthest = max((setting.k for setting in settings), default=0)
    rows, products = nearest_queries(asked.queries, train.queries, max(1, furthest))
    votes = {k: xl_votes(rows[:, :k], products[:, :k], relevant, k=k) for k in {one.k for one in settings if one.k}}
    for setting in settings:
        if setting.method == "encoder":
            scores: npt.NDArray[Any] = own
        elif setting.method == "xs":
            scores = asked.queries @ xs_vectors(documents, train, setting).T
        else:
            scores = xl_scores(own, votes[setting.k], setting.share)
        found[setting] = recalls(pair_ranks(scores, asked.pairs), asked.pairs, len(asked))
    return found


def chosen(
    data: TextSet, settings: Sequence[Setting], *, seed: int, say: Callable[[str], None] = lambda line: None
) -> dict[tuple[Method, bool], Setting]:
    """Return the best setting of each (method, printed) on held-out training queries.

    The mean of the set's two recalls decides, then the larger lambda, then the smaller k.
    """
    totals = dict.fromkeys(settings, 0.0)
    per_fold = len(data.train) / _FOLDS
    wanted = min(_FOLDS, max(1, round(_HELD_OUT / per_fold)))
    for number, (fitted, held_out) in enumerate(islice(folds(data, count=_FOLDS, seed=seed), wanted), 1):
        say(f"{data.name}: lambda and k on held-out training queries, fold {number} of {wanted}")
        for setting, found in measured(data.documents, fitted, held_out, settings).items():
            totals[setting] += float(sum(found[name].sum() for name in DECIDED_BY[data.name]))
    best: dict[tuple[Method, bool], Setting] = {}
    for setting in sorted(settings, key=lambda one: (-one.share, one.k)):
        key = (setting.method, setting.printed)
        if key not in best or totals[setting] > totals[best[key]]:
            best[key] = setting
    return best
