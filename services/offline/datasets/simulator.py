"""Simulated interactions: a substitute for missing real data, and a source of any size.

Each user has a few topics that drift between sessions. Within a session, the next item follows the
previous one in the topic's release order, is drawn by Zipf popularity, or is one of the newest. No user takes an item
twice or before its release.

Letters: U users, X items, T topics, S items per topic, L most events of one user.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .interactions import Interactions, from_columns

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# 2024-01-01 00:00 UTC; a fixed start, so that equal seeds give equal times.
_START_S = 1_704_067_200
_DAY_S = 86_400
_ATTEMPTS = 6
# Chance per session that one of the user's interests is replaced.
_DRIFT = 0.15
# Chances that an event's item follows the previous one in the release order, and that it is one of the newest.
_FOLLOW_SHARE, _NOVELTY_SHARE = 0.4, 0.08
_ZIPF_EXPONENT = 0.9
_MEAN_SESSION_EVENTS = 10.0
_INTEREST_SHARES = np.array([0.55, 0.30, 0.15])
_TOPICS = (
    "Harbour Tales", "Night Trains", "Deep Space", "Quiet Comedy", "Mountain Climbs", "Old Detectives", "Heists",
    "Court Dramas", "Silent Films", "Robots", "Family Feuds", "Desert Roads", "Jazz Clubs", "Sea Monsters", "Chess",
    "Royal Intrigue", "Small Towns", "Ghost Houses", "Spy Games", "Cooking", "Wild Rivers", "Time Loops", "Football",
    "Circus Life", "Lost Cities", "Puppets", "First Love", "Revolutions", "Polar Winters", "Street Dance", "Westerns",
    "Hospital Wards", "School Days", "Volcanoes", "Samurai", "Radio Plays", "Gardeners", "Pirates", "Mathematics",
    "Mystery Islands",
)  # fmt: skip
_ADJECTIVES = (
    "Amber", "Broken", "Crimson", "Distant", "Electric", "Forgotten", "Golden", "Hidden", "Iron", "Jade", "Last",
    "Midnight", "Northern", "Open", "Paper", "Quiet", "Restless", "Silver", "Thirteenth", "Unlikely", "Velvet",
    "Wandering", "Yellow", "Zealous", "Borrowed", "Hollow",
)  # fmt: skip
_NOUNS = (
    "Anchor", "Bridge", "Compass", "Door", "Engine", "Feather", "Garden", "Horizon", "Inventor", "Journey", "Key",
    "Lantern", "Mirror", "Neighbour", "Orchard", "Promise", "Question", "River", "Signal", "Tower", "Umbrella",
    "Voyage", "Window", "Letter", "Winter",
)  # fmt: skip
_FORMATS = ("Film", "Series", "Documentary")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorConfig:
    """The sizes and seed of a simulation. Raises: ValueError naming the field and what is allowed."""

    num_users: int = 2_000
    num_items: int = 2_000
    num_topics: int = 40
    mean_events_per_user: float = 120.0
    max_events_per_user: int = 400
    days: int = 180
    # Share of items released during the simulated time.
    new_item_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_users", 1, 10_000_000),
            ("num_items", 20, 10_000_000),
            ("num_topics", 1, self.num_items // 4),
            ("max_events_per_user", 3, 100_000),
            ("mean_events_per_user", 3, self.max_events_per_user),
            ("days", 1, 36_500),
            ("new_item_share", 0, 0.9),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value}; allowed: {low} to {high}")


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """The items. Shapes: release_s (T, S) increasing along S; item_at_rank (T, S) by popularity; quality (X,)."""

    size: int
    release_s: FloatArray
    item_at_rank: IntArray
    topic_cdf: FloatArray
    rank_cdf: FloatArray
    quality: FloatArray


def simulate(config: SimulatorConfig) -> Interactions:
    """Simulate a stream of ratings; equal configurations give equal data. Cost: O(U L S), and U x X bytes of memory."""
    rng = np.random.default_rng(config.seed)
    catalogue = _build_catalogue(config, rng)
    times_s, sessions, lengths = _event_times(config, rng)
    items, affinity = _choose_items(config, catalogue, times_s, sessions, lengths, rng)
    users, steps = np.nonzero(items >= 0)
    item_codes = items[users, steps]
    mood = rng.normal(0.0, 0.4, config.num_users)
    stars = 3.3 + affinity[users, steps] + mood[users] + catalogue.quality[item_codes] + rng.normal(0, 0.7, len(users))
    num_items = config.num_topics * catalogue.size
    item_ids = [str(code + 1) for code in range(num_items)]
    titles, categories = _names(catalogue, rng)
    return from_columns(
        users=(users, [str(code + 1) for code in range(config.num_users)]),
        items=(item_codes, item_ids),
        timestamps=_START_S + times_s[users, steps].astype(np.int64),
        values=np.clip(np.rint(stars), 1, 5).astype(np.float32),
        types=(np.zeros(len(users), dtype=np.int64), ["rating"]),
        titles=dict(zip(item_ids, titles, strict=True)),
        categories=dict(zip(item_ids, categories, strict=True)),
        name="simulator",
        source=(
            f"built-in simulator (seed {config.seed}, no real people): {len(users):,} ratings of "
            f"{len(np.unique(item_codes)):,} items by {config.num_users:,} users"
        ),
    )


def _build_catalogue(config: SimulatorConfig, rng: np.random.Generator) -> _Catalogue:
    topics, size = config.num_topics, config.num_items // config.num_topics
    horizon_s = float(config.days * _DAY_S)
    is_new = rng.random((topics, size)) < config.new_item_share
    release_s = np.where(is_new, rng.random((topics, size)) * horizon_s, -1.0)
    # Every topic has items from the first second on.
    release_s[:, :2] = -1.0
    weights = np.arange(1, size + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
    topic_weights = np.arange(1, topics + 1, dtype=np.float64) ** -0.7
    return _Catalogue(
        size=size,
        release_s=np.sort(release_s, axis=1),
        item_at_rank=np.argsort(rng.random((topics, size)), axis=1),
        topic_cdf=np.cumsum(rng.permutation(topic_weights)) / topic_weights.sum(),
        rank_cdf=np.cumsum(weights) / weights.sum(),
        quality=rng.normal(0.0, 0.4, topics * size),
    )


def _event_times(config: SimulatorConfig, rng: np.random.Generator) -> tuple[FloatArray, BoolArray, IntArray]:
    """Return times_s (U, L) since the start, session starts (U, L), and events per user (U,)."""
    horizon_s = float(config.days * _DAY_S)
    # A few users produce most events; subtracting sigma^2 / 2 preserves the mean.
    activity = rng.lognormal(np.log(config.mean_events_per_user) - 0.32, 0.8, config.num_users)
    lengths = np.clip(np.rint(activity), 3, config.max_events_per_user).astype(np.int64)
    shape = (config.num_users, int(lengths.max()))
    session_starts = rng.random(shape) < 1.0 / _MEAN_SESSION_EVENTS
    session_starts[:, 0] = True
    in_session_s = 20.0 + rng.exponential(90.0, shape)
    # Active users have more sessions, not longer ones.
    expected_sessions = np.maximum(lengths / _MEAN_SESSION_EVENTS, 1.0)
    pause_s = rng.exponential(1.0, shape) * (0.45 * horizon_s / expected_sessions)[:, None]
    gaps_s = np.where(session_starts, pause_s, in_session_s)
    gaps_s[:, 0] = rng.random(config.num_users) * 0.7 * horizon_s
    times_s = np.cumsum(gaps_s, axis=1)
    lengths = np.minimum(lengths, np.maximum(np.count_nonzero(times_s < horizon_s, axis=1), 1))
    return times_s, session_starts, lengths


def _choose_items(
    config: SimulatorConfig,
    catalogue: _Catalogue,
    times_s: FloatArray,
    session_starts: BoolArray,
    lengths: IntArray,
    rng: np.random.Generator,
) -> tuple[IntArray, FloatArray]:
    """Return items (U, L), -1 if none was left, and affinity (U, L): the topic's share of the user's interests."""
    num_users, max_length = times_s.shape
    items = np.full((num_users, max_length), -1, dtype=np.int64)
    affinity = np.zeros((num_users, max_length))
    taken = np.zeros((num_users, config.num_topics * catalogue.size), dtype=bool)
    interests = _draw(catalogue.topic_cdf, (num_users, len(_INTEREST_SHARES)), rng)
    slot = np.zeros(num_users, dtype=np.int64)
    shelf = np.full(num_users, -1, dtype=np.int64)
    for step in range(max_length):
        active = np.flatnonzero(lengths > step)
        starting = active[session_starts[active, step]]
        drifting = starting[rng.random(len(starting)) < _DRIFT]
        interests[drifting, rng.integers(0, interests.shape[1], len(drifting))] = _draw(
            catalogue.topic_cdf, (len(drifting),), rng
        )
        slot[starting] = _draw(np.cumsum(_INTEREST_SHARES), (len(starting),), rng)
        shelf[starting] = -1
        topic = interests[active, slot[active]]
        position = _choose_positions(config, catalogue, topic, shelf[active], times_s[active, step], taken, active, rng)
        found = position >= 0
        chosen = active[found]
        code = topic[found] * catalogue.size + position[found]
        items[chosen, step] = code
        taken[chosen, code] = True
        shelf[chosen] = position[found]
        affinity[chosen, step] = _INTEREST_SHARES[slot[chosen]]
    return items, affinity


def _choose_positions(
    config: SimulatorConfig,
    catalogue: _Catalogue,
    topic: IntArray,
    previous: IntArray,
    now_s: FloatArray,
    taken: BoolArray,
    users: IntArray,
    rng: np.random.Generator,
) -> IntArray:
    """Return each active user's position in the topic's release order (A,), or -1. The first two attempts follow the
    user's habit; later attempts draw by popularity.
    """
    released = np.count_nonzero(catalogue.release_s[topic] <= now_s[:, None], axis=1)
    habit = rng.random(len(topic))
    follows = (habit < _FOLLOW_SHARE) & (previous >= 0)
    newest = (habit >= _FOLLOW_SHARE) & (habit < _FOLLOW_SHARE + _NOVELTY_SHARE)
    position = np.full(len(topic), -1, dtype=np.int64)
    for attempt in range(_ATTEMPTS):
        open_rows = np.flatnonzero(position < 0)
        if not len(open_rows):
            break
        rank = _draw(catalogue.rank_cdf, (len(open_rows),), rng)
        candidate = catalogue.item_at_rank[topic[open_rows], rank]
        if attempt < 2:
            # One of the next items in release order, which a sequential model can learn.
            ahead = (previous[open_rows] + rng.geometric(0.4, len(open_rows))) % released[open_rows]
            candidate = np.where(follows[open_rows], ahead, candidate)
            fresh = released[open_rows] - 1 - rng.integers(0, 3, len(open_rows))
            candidate = np.where(newest[open_rows], np.maximum(fresh, 0), candidate)
        allowed = candidate < released[open_rows]
        allowed &= ~taken[users[open_rows], topic[open_rows] * catalogue.size + candidate]
        position[open_rows[allowed]] = candidate[allowed]
    return position


def _draw(cdf: FloatArray, shape: tuple[int, ...], rng: np.random.Generator) -> IntArray:
    return np.minimum(np.searchsorted(cdf, rng.random(shape)), len(cdf) - 1).astype(np.int64)


def _names(catalogue: _Catalogue, rng: np.random.Generator) -> tuple[list[str], list[tuple[str, ...]]]:
    titles: list[str] = []
    categories: list[tuple[str, ...]] = []
    topics, size = catalogue.release_s.shape
    pairs = len(_ADJECTIVES) * len(_NOUNS)
    order = rng.permutation(pairs)
    formats = rng.integers(0, len(_FORMATS), topics * size)
    for code in range(topics * size):
        topic, position = divmod(code, size)
        pair, volume = int(order[code % pairs]), code // pairs
        adjective, noun = _ADJECTIVES[pair // len(_NOUNS)], _NOUNS[pair % len(_NOUNS)]
        year = 2024 if catalogue.release_s[topic, position] > 0 else 2023 - int(position) % 40
        titles.append(f"The {adjective} {noun}{f' {volume + 1}' if volume else ''} ({year})")
        topic_name = _TOPICS[topic] if topic < len(_TOPICS) else f"Topic {topic + 1}"
        categories.append((topic_name, _FORMATS[int(formats[code])]))
    return titles, categories
