"""The generator's constants, estimated from a trained bundle: `freshet bench catalogues --bundle BUNDLE`.

Spectra, gates and the pair network are read off the model. Five constants have no closed form, because views and
normalisation mix them: how much the views share, within which axes the rest of them turns, how much of an item is
popularity, where items lie on the queries' common axis, and how much clusters hold; and how unequal the pair
network makes the pairs. They are moved until scenes generated at the model's own shape show the model's
correlation and spread of cosines, popularity share, mean cosine, clustering and gate entropy.

Letters: X items, B queries, P pairs, d width, G gate hidden width.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.scoring.states import FloatArray
from services.offline.evaluation.catalogues.fitted import QUICK, Fitted
from services.offline.evaluation.catalogues.generator import generate
from services.offline.evaluation.catalogues.scene import Scene
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.report import Report, Request, plain_page, report_of, written
from services.offline.training.codebooks.k_means import nearest, product_k_means

_RESULTS = 100
_CLUSTERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Averages over queries, each over that query's items, unless said otherwise.

    cosine_mean, cosine_sd: of c_p. pair_correlation: between two pairs' cosines. average_sd: of the mean cosine.
    popularity_share: share of the mean cosine's variance that is the same for all queries. score_mean, score_sd: of s.
    score_heights: (s - mean) / sd at ranks 1, 10, 100. average_correlation: of s with the mean cosine.
    spread: E over pi of |c_p - s|. entropy: of pi, over log P. largest_weight: max_p pi_p.
    average_recall: of the K best, those among the 200, 500, 1000 best by mean cosine.
    """

    cosine_mean: float
    cosine_sd: float
    pair_correlation: float
    average_sd: float
    popularity_share: float
    score_mean: float
    score_sd: float
    score_heights: tuple[float, float, float]
    average_correlation: float
    spread: float
    entropy: float
    largest_weight: float
    average_recall: tuple[float, float, float]


def silu(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x sigmoid(x)."""
    return np.asarray(values / (1 + np.exp(-values)))


def pair_cosines(scene: Scene, query: int) -> npt.NDArray[np.float32]:
    """One query's cosines with every item: (X, P)."""
    cosines = np.einsum("qd,xpd->xqp", scene.queries.components[query], scene.items.components, optimize=True)
    return np.ascontiguousarray(cosines).reshape(len(scene.items), -1)


def pair_network(scene: Scene, cosines: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The pair network's output for cosines (n, P): (n, P)."""
    gate = scene.pair_gate
    if gate is None:
        return np.zeros_like(cosines)
    return np.asarray(silu(cosines @ gate.hidden_weight.T + gate.hidden_bias) @ gate.out_weight.T + gate.out_bias)


def measure(scene: Scene) -> Moments:
    """Moments over all queries of a scene of at least 1,000 items. Memory: a few (X, P) arrays."""
    rows: list[dict[str, Any]] = []
    averages = np.empty((len(scene.queries), len(scene.items)), dtype=np.float32)
    for query in range(len(scene.queries)):
        cosines = pair_cosines(scene, query)
        pairs = cosines.shape[1]
        gate = pair_network(scene, cosines)
        if scene.queries.gate is not None and scene.items.gate is not None:
            gate = gate + scene.queries.gate[query] * scene.items.gate
        weights = np.exp(silu(gate))
        weights /= weights.sum(axis=1, keepdims=True)
        scores = (weights * cosines).sum(axis=1)
        average = cosines.mean(axis=1)
        averages[query] = average
        order = np.argsort(-scores)
        by_average = np.empty(len(average), dtype=np.int64)
        by_average[np.argsort(-average)] = np.arange(len(average))
        # var of the mean = mean var * (1 + (P - 1) correlation) / P, which defines the correlation meant here.
        inflation = average.var() / cosines.var(axis=0).mean() * pairs
        entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(axis=1).mean()
        rows.append(
            {
                "cosine_mean": cosines.mean(),
                "cosine_sd": np.sqrt(cosines.var(axis=0).mean()),
                "pair_correlation": (inflation - 1) / (pairs - 1),
                "average_sd": average.std(),
                "score_mean": scores.mean(),
                "score_sd": scores.std(),
                "score_heights": (scores[order[[0, 9, 99]]] - scores.mean()) / scores.std(),
                "average_correlation": np.corrcoef(scores, average)[0, 1],
                "spread": (weights * np.abs(cosines - scores[:, None])).sum(axis=1).mean(),
                "entropy": entropy / np.log(pairs),
                "largest_weight": weights.max(axis=1).mean(),
                "average_recall": [(by_average[order[:_RESULTS]] < size).mean() for size in (200, 500, 1000)],
            }
        )
    popularity = float(averages.mean(axis=0).var() / averages.var(axis=1).mean())
    return Moments(popularity_share=popularity, **{name: _mean_of([row[name] for row in rows]) for name in rows[0]})


def mean_moments(moments: Sequence[Moments]) -> Moments:
    """The moments' means over several scenes."""
    return Moments(
        **{field.name: _mean_of([getattr(each, field.name) for each in moments]) for field in fields(Moments)}
    )


def _mean_of(values: Sequence[Any]) -> Any:
    means = np.mean(values, axis=0)
    return tuple(means.tolist()) if means.ndim else float(means)


def clustering(components: npt.NDArray[np.float32]) -> float:
    """Share of the items' variance that 64 k-means centres explain; components (X, P_x, d)."""
    flat = torch.from_numpy(components.reshape(len(components), -1).astype(np.float32))
    flat -= flat.mean(dim=0)
    centres = product_k_means(flat, 1, _CLUSTERS, torch.Generator().manual_seed(0))
    own = centres[0][nearest(flat[None], centres)[0]]
    return 1 - float((flat - own).square().sum() / flat.square().sum())


_QUERIES = 40
_ROUNDS = 10
_AXES_SHARE = 0.9  # gate axes hold this share of the gates' variance


def fit(scene: Scene, *, say: Callable[[str], None] = lambda line: None) -> tuple[Fitted, Moments, Moments]:
    """The constants for a scene of a trained model, with the moments wanted and those that the constants give."""
    wanted, wanted_clustering = measure(scene), clustering(scene.items.components)
    fitted = _read_off(scene)
    found = wanted
    for number in range(_ROUNDS):
        trials = [generate(scene.shape, num_queries=_QUERIES, seed=seed, fitted=fitted) for seed in range(2)]
        moments = [measure(trial) for trial in trials]
        found = mean_moments(moments)
        clusters = float(np.mean([clustering(trial.items.components) for trial in trials]))
        say(f"round {number}: {found} clustering={clusters:.3f} wanted {wanted_clustering:.3f}")
        if number == _ROUNDS - 1:
            break
        fitted = replace(  # damped, since each of them moves the others' moments, too
            fitted,
            shared_share=_step(fitted.shared_share, wanted.pair_correlation / found.pair_correlation, 0.5),
            leading_share=_step(fitted.leading_share, found.cosine_sd / wanted.cosine_sd, 2.0),
            popularity_share=_step(fitted.popularity_share, wanted.popularity_share / found.popularity_share, 1.0),
            cluster_share=_step(fitted.cluster_share, wanted_clustering / clusters, 1.0),
            pair_mean_sd=fitted.pair_mean_sd * _ratio(1 - wanted.entropy, 1 - found.entropy) ** 0.5,
            item_level=float(np.clip(fitted.item_level + 2 * (wanted.cosine_mean - found.cosine_mean), -0.6, 0.6)),
        )
    return fitted, wanted, found


def _read_off(scene: Scene) -> Fitted:
    """Everything that has a closed form; the five others start where the table's first fit has them."""
    gate, items, queries = scene.pair_gate, scene.items, scene.queries
    if gate is None or items.gate is None or queries.gate is None:
        raise ValueError(f"{scene.name} has no gate parts to fit")
    common = queries.components.mean(axis=0)
    popularity = np.einsum("qd,xpd->x", common, items.components)
    popularity = (popularity - popularity.mean()) / popularity.std()
    item_offset, item_exponent = _power_law(items.components)
    query_offset, query_exponent = _power_law(queries.components)
    sample = np.random.default_rng(0).permutation(len(items))[:512]
    part = replace(scene, items=replace(items, components=items.components[sample], gate=items.gate[sample]))
    cosines = np.concatenate([pair_cosines(part, query) for query in range(min(_QUERIES, len(queries)))])
    average = cosines.mean(axis=1)
    average = (average - average.mean()) / average.std()
    outputs = pair_network(scene, cosines)
    means = outputs.mean(axis=0)
    slopes = average @ (outputs - means) / len(outputs)
    residual = outputs - means - average[:, None] * slopes
    # In a trained gate the mean products lean the way of the network's means; generated, they are independent.
    products = queries.gate.mean(axis=0) * items.gate.mean(axis=0)
    leaning = (means + products).var() - (queries.gate.mean(axis=0).std() * items.gate.mean(axis=0).std()) ** 2
    return replace(
        QUICK,
        popularity_quantiles=tuple(round(float(q), 3) for q in np.quantile(popularity, np.linspace(0, 1, 21))),
        item_spectrum_offset=item_offset,
        item_spectrum_exponent=item_exponent,
        query_level=float(np.linalg.norm(common, axis=1).mean()),
        query_spectrum_offset=query_offset,
        query_spectrum_exponent=query_exponent,
        item_gate_mean_sd=float(items.gate.mean(axis=0).std()),
        item_gate_sd=float(items.gate.std(axis=0).mean()),
        item_gate_axes=_axes(items.gate),
        query_gate_mean_sd=float(queries.gate.mean(axis=0).std()),
        query_gate_sd=float(queries.gate.std(axis=0).mean()),
        query_gate_axes=_axes(queries.gate),
        hidden_sd=float((cosines @ gate.hidden_weight.T).std()),
        hidden_bias_sd=float(gate.hidden_bias.std()),
        pair_mean_sd=float(np.sqrt(leaning)),
        pair_slope_sd=float(slopes.std()),
        pair_slope_to_cosine=float(np.corrcoef(slopes, cosines[average > 1].mean(axis=0))[0, 1]),
        pair_mean_to_slope=float(np.corrcoef(means, slopes)[0, 1]),
        pair_residual_sd=float(residual.std(axis=0).mean()),
    )


def _power_law(components: FloatArray) -> tuple[float, float]:
    """(offset, exponent) of the law nearest to the mean eigenvalues of the components' covariances, in logarithms."""
    spectra = [np.linalg.eigvalsh(np.cov(part.T))[::-1] for part in components.transpose(1, 0, 2)]
    spectrum = np.log(np.mean([values / values.sum() for values in spectra], axis=0)[:24])
    ranks = np.arange(len(spectrum))
    best = (np.inf, 1.0, 1.0)
    for offset in np.arange(0.5, 30, 0.5):
        law = -np.log(ranks + offset)
        centred = law - law.mean()
        exponent = float(centred @ spectrum / (centred @ centred))
        error = float(((spectrum - spectrum.mean() - exponent * centred) ** 2).sum())
        best = min(best, (error, float(offset), exponent))
    return best[1], best[2]


def _axes(gate: FloatArray) -> int:
    """How many principal axes hold most of the gates' variance."""
    variances = np.linalg.svd(gate - gate.mean(axis=0), compute_uv=False) ** 2
    return int(np.searchsorted(np.cumsum(variances) / variances.sum(), _AXES_SHARE) + 1)


def _step(value: float, ratio: float, power: float) -> float:
    """Move a share by a damped power of wanted / found, within (0, 1)."""
    return float(np.clip(value * np.clip(ratio, 0.5, 2.0) ** power, 0.005, 0.95))


def _ratio(wanted: float, found: float) -> float:
    """wanted / found, within a factor of two."""
    return float(np.clip(wanted / max(found, 1e-9), 0.5, 2.0))


def run(request: Request, bundle: Path, *, num_queries: int) -> Report:
    """Fit a bundle; writes catalogues.{md,json}: moments, trained and generated, and `constants` as in `fitted.py`.

    Raises: BundleError for a bundle that is none.
    """
    began = time.perf_counter()
    scene = trained_scene(bundle, num_queries=num_queries, seed=request.seed)
    fitted, wanted, found = fit(scene, say=request.say)
    generated = asdict(found)
    rows = [{"moment": name, "trained": value, "generated": generated[name]} for name, value in asdict(wanted).items()]
    constants = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(fitted).items()}
    report = report_of("catalogues", request, rows, began) | {"constants": constants}
    return written(request, report, page)


def page(report: Report) -> str:
    """catalogues.md: moments beside each other, and the constants as `fitted.py` takes them."""
    listed = [f"    {name}={value}," for name, value in report["constants"].items()]
    return plain_page(Path(__file__).with_name("page.template.md"), report | {"listed": listed})
