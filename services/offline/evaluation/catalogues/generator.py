"""Catalogues and queries at any shape whose score and gate distributions are those of a trained model.

Isotropic noise has independent cosines and would make every heuristic look bad. In a trained model half the variance
of scores is popularity, tastes have a steep spectrum, an item's components are views of one latent vector, and the gate
moves weight between pairs as the average cosine rises. The construction:

    item    z = (level + sqrt(l_0) u, sqrt(l_i) e_i)   u: popularity; e_i: clusters plus noise; l: a power law
    query   y = (1, sqrt(m_i) e_i), scaled             all queries share the first axis
    views   g_j = unit(E A_j z), f_i = unit(E B_i y)   A, B = a I + sqrt(1 - a^2) * (a random rotation), E isometry
    gates   Item and query gates are linear in a few axes of z and y. The pair network is random, then adjusted so that
            each pair's output has the fitted mean, slope over the average cosine and residual on this catalogue's pairs

Constants are in `fitted.py`.

Letters: X items, B queries, P_q, P_x components, P = P_q * P_x, d width, G gate hidden width, r latent width.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates
from services.offline.evaluation.catalogues.fitted import PAPER, Fitted
from services.offline.evaluation.catalogues.scene import Scene, Shape

_CHUNK = 65_536  # items per step, so that only the catalogue itself takes memory for all items
_LARGEST_LATENT = 64
_PROBE_QUERIES, _PROBE_ITEMS = 64, 512
# Independent random streams, so that items do not depend on the number of queries.
_WORLD, _CENTRES, _ITEMS, _QUERIES, _GATE = range(5)


def generate(
    shape: Shape,
    *,
    num_items: int | None = None,
    num_queries: int,
    seed: int,
    fitted: Fitted = PAPER,
) -> Scene:
    """Return items, queries and pair gate at `shape`, with `num_items` items if given, else the shape's.

    There are no labels (`Scene.label_draws` is (B, 0)), because they could only be drawn from the scores by which the
    algorithms are evaluated. Equal arguments make equal scenes.
    Raises: ValueError for num_items or num_queries below 1.
    Cost: X r (P_x d + P) multiply-adds; memory: the result and 50 MB.
    """
    count = shape.num_items if num_items is None else num_items
    for name, value in (("num_items", count), ("num_queries", num_queries)):
        if value < 1:
            raise ValueError(f"{name}={value}; allowed: at least 1")
    world = World.drawn(shape, fitted, seed, num_items=count)
    items = make_items(world, count)
    queries = make_queries(world, num_queries)
    pair_gate = make_pair_gate(world)
    draws = np.empty((num_queries, 0), dtype=np.int64)
    return Scene(name=shape.name, items=items, queries=queries, pair_gate=pair_gate, label_draws=draws)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The shared part of a scene's items and queries.

    Shapes: item_views (P_x, r, d), query_views (P_q, r, d); item_scales, query_scales (r,) standard deviations per
    latent axis; centres (clusters, r); item_gate_map, query_gate_map (r, P).
    """

    shape: Shape
    fitted: Fitted
    seed: int
    item_views: FloatArray
    query_views: FloatArray
    item_scales: FloatArray
    query_scales: FloatArray
    centres: FloatArray
    item_gate_map: FloatArray
    query_gate_map: FloatArray
    item_gate_means: FloatArray
    query_gate_means: FloatArray

    @classmethod
    def drawn(cls, shape: Shape, fitted: Fitted, seed: int, *, num_items: int) -> "World":
        rng = np.random.default_rng([seed, _WORLD])
        latent = min(shape.component_width, _LARGEST_LATENT)
        embedding = np.linalg.qr(rng.standard_normal((shape.component_width, latent)))[0].T
        item_views = _views(rng, shape.num_item_components, latent, fitted)
        query_views = _views(rng, shape.num_query_components, latent, fitted)
        axes = np.arange(latent - 1)
        taste = (axes + fitted.item_spectrum_offset) ** -fitted.item_spectrum_exponent
        wish = (axes + fitted.query_spectrum_offset) ** -fitted.query_spectrum_exponent
        rest = 1 - fitted.item_level**2 - fitted.popularity_share
        pairs = shape.num_pairs
        # Centres have their own random stream, so a catalogue of another size has the same views and gates.
        num_clusters = max(1, round(fitted.clusters_per_root_item * num_items**0.5))
        centres = np.random.default_rng([seed, _CENTRES]).standard_normal((num_clusters, latent), dtype=np.float32)
        return cls(
            shape=shape,
            fitted=fitted,
            seed=seed,
            item_views=(item_views @ embedding).astype(np.float32),
            query_views=(query_views @ embedding).astype(np.float32),
            item_scales=np.sqrt(np.r_[fitted.popularity_share, rest * taste / taste.sum()]).astype(np.float32),
            query_scales=np.sqrt(np.r_[0, (1 - fitted.query_level**2) * wish / wish.sum()]).astype(np.float32),
            centres=centres,
            item_gate_map=_gate_map(rng, latent, pairs, fitted.item_gate_axes) * np.float32(fitted.item_gate_sd),
            query_gate_map=_gate_map(rng, latent, pairs, fitted.query_gate_axes) * np.float32(fitted.query_gate_sd),
            item_gate_means=(fitted.item_gate_mean_sd * rng.standard_normal(pairs)).astype(np.float32),
            query_gate_means=(fitted.query_gate_mean_sd * rng.standard_normal(pairs)).astype(np.float32),
        )


def make_items(world: World, count: int) -> ItemStates:
    """Return X item states."""
    shape = world.shape
    components = np.empty((count, shape.num_item_components, shape.component_width), dtype=np.float32)
    gate = np.empty((count, shape.num_pairs), dtype=np.float32) if shape.gated else None
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        _make_chunk(world, start // _CHUNK, components[start:stop], None if gate is None else gate[start:stop])
    return ItemStates(components=components, gate=gate)


def average_items(shape: Shape, count: int, *, seed: int) -> FloatArray:
    """Return the averaged components (X, d) of `generate`'s items without storing the items."""
    world = World.drawn(shape, PAPER, seed, num_items=count)
    averages = np.empty((count, shape.component_width), dtype=np.float32)
    chunk = np.empty((min(count, _CHUNK), shape.num_item_components, shape.component_width), dtype=np.float32)
    for start in range(0, count, _CHUNK):
        part = chunk[: min(_CHUNK, count - start)]
        _make_chunk(world, start // _CHUNK, part, None)
        np.mean(part, axis=1, out=averages[start : start + len(part)])
    return averages


def _make_chunk(world: World, number: int, components: FloatArray, gate: FloatArray | None) -> None:
    """Fill components (n, P_x, d) and gate (n, P); every chunk has its own random stream."""
    fitted = world.fitted
    rng = np.random.default_rng([world.seed, _ITEMS, number])
    size = len(components)
    unit = rng.standard_normal((size, len(world.item_scales)), dtype=np.float32)
    unit *= np.float32(np.sqrt(1 - fitted.cluster_share))
    clusters = (len(world.centres) * rng.random(size) ** 2).astype(np.int64)  # some clusters are large
    unit += np.float32(np.sqrt(fitted.cluster_share)) * world.centres[clusters]
    levels = np.linspace(0, 1, len(fitted.popularity_quantiles))
    unit[:, 0] = np.interp(rng.random(size), levels, fitted.popularity_quantiles)
    vectors = unit * world.item_scales
    vectors[:, 0] += np.float32(fitted.item_level)
    _project(vectors, world.item_views, out=components)
    if gate is not None:
        np.matmul(unit, world.item_gate_map, out=gate)
        gate += world.item_gate_means


def make_queries(world: World, count: int) -> QueryStates:
    """Return B query states."""
    shape = world.shape
    rng = np.random.default_rng([world.seed, _QUERIES])
    unit = rng.standard_normal((count, len(world.query_scales)), dtype=np.float32)
    vectors = unit * world.query_scales
    vectors[:, 0] = np.float32(world.fitted.query_level)
    components = np.empty((count, shape.num_query_components, shape.component_width), dtype=np.float32)
    _project(vectors, world.query_views, out=components)
    gate = unit @ world.query_gate_map + world.query_gate_means if shape.gated else None
    return QueryStates(components=components, gate=gate)


def make_pair_gate(world: World) -> PairGate:
    """Return a random gate, adjusted to have the fitted moments on a sample of this world's pairs."""
    shape, fitted, pairs = world.shape, world.fitted, world.shape.num_pairs
    rng = np.random.default_rng([world.seed, _GATE])
    queries, items = make_queries(world, _PROBE_QUERIES), make_items(world, _PROBE_ITEMS)
    cosines = np.einsum("bqd,xpd->bxqp", queries.components, items.components, optimize=True).reshape(-1, pairs)
    average = cosines.mean(axis=1)
    average = (average - average.mean()) / average.std()
    # Each hidden unit gets its own mixture of cosines, at the trained first layer's scale.
    hidden_weight = rng.standard_normal((shape.gate_hidden, pairs))
    hidden_weight *= fitted.hidden_sd / (cosines @ hidden_weight.T).std()
    hidden_bias = fitted.hidden_bias_sd * rng.standard_normal(shape.gate_hidden)
    before = cosines @ hidden_weight.T + hidden_bias
    hidden = before / (1 + np.exp(-before))
    out_weight = rng.standard_normal((pairs, shape.gate_hidden)) / np.sqrt(shape.gate_hidden)
    centred = hidden - hidden.mean(axis=0)
    slopes = average @ centred / len(centred)
    # Remove each row's slope over the average cosine; the wanted slope is added below.
    out_weight -= np.outer(out_weight @ slopes, slopes) / (slopes @ slopes)
    residual = (centred @ out_weight.T).std(axis=0)
    out_weight *= (fitted.pair_residual_sd / residual)[:, None]
    # Where the average is high, a trained gate moves weight to the pairs with the highest cosines.
    high = cosines[average > 1].mean(axis=0)
    slope = _correlated(rng, (high - high.mean()) / max(float(high.std()), 1e-12), fitted.pair_slope_to_cosine)
    mean = _correlated(rng, slope, fitted.pair_mean_to_slope)
    wanted = fitted.pair_slope_sd * slope
    direction = np.linalg.lstsq(centred.T @ centred / len(centred) + 1e-3 * np.eye(shape.gate_hidden), slopes)[0]
    direction /= direction @ slopes
    out_weight += np.outer(wanted, direction)
    out_bias = fitted.pair_mean_sd * mean - out_weight @ hidden.mean(axis=0)
    return PairGate(
        hidden_weight=hidden_weight.astype(np.float32),
        hidden_bias=hidden_bias.astype(np.float32),
        out_weight=out_weight.astype(np.float32),
        out_bias=out_bias.astype(np.float32),
    )


def _views(rng: np.random.Generator, count: int, latent: int, fitted: Fitted) -> npt.NDArray[np.float64]:
    """Return n matrices a I + sqrt(1 - a^2) R, (n, r, r), where a is the root of `shared_share`.

    R rotates the leading axes and the other axes separately, at random.
    """
    leading = max(1, min(latent - 1, round(fitted.leading_share * latent)))
    views = np.empty((count, latent, latent))
    for view in views:
        view[:] = np.sqrt(fitted.shared_share) * np.eye(latent)
        for block in (slice(0, leading), slice(leading, latent)):
            size = block.stop - block.start
            rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
            view[block, block] += np.sqrt(1 - fitted.shared_share) * rotation
    return views


def _correlated(rng: np.random.Generator, values: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Mix values (P,) of mean 0 and variance 1 with noise to the expected correlation `share`."""
    return np.asarray(share * values + np.sqrt(1 - share**2) * rng.standard_normal(len(values)))


def _gate_map(rng: np.random.Generator, latent: int, pairs: int, axes: int) -> FloatArray:
    """Return random weights (r, P) on the first `axes` latent axes; columns have unit norm."""
    weights = np.zeros((latent, pairs))
    used = min(axes, latent)
    weights[:used] = rng.standard_normal((used, pairs))
    return np.asarray(weights / np.linalg.norm(weights, axis=0), dtype=np.float32)


def _project(vectors: FloatArray, views: FloatArray, *, out: FloatArray) -> None:
    """Multiply vectors (n, r) by views (P, r, d), and write the products, at unit norm, to `out` (n, P, d)."""
    latent = vectors.shape[1]
    stacked = np.ascontiguousarray(views.transpose(1, 0, 2)).reshape(latent, -1)
    np.matmul(vectors, stacked, out=out.reshape(len(vectors), -1))
    out /= np.maximum(np.sqrt(np.einsum("npd,npd->np", out, out)), 1e-12)[:, :, None]
