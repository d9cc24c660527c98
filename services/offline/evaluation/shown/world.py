"""A simulated world in which what was shown matters: people tire of it, turn things down, and new items come.

Nothing here is real. People and items are directions; who sees an item takes it with a probability that grows with the
cosine between the two. The system knows items and people with noise that shrinks as they are taken, as a model and its
feedback would. Effects can be switched off one by one: what is then left of a gain is no effect of what was shown.

Letters: U people, X items, d width.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from services.algorithms.encoding.aversion import STEP
from services.algorithms.rules.reserved_positions import draw_slots
from services.algorithms.scoring.impressions import discount

Floats = npt.NDArray[np.float64]

_DAY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Sizes and effects, set before anything was measured."""

    people: int = 400
    items: int = 600
    new_a_day: int = 10
    days: int = 20
    answers_a_day: int = 3
    k: int = 10
    width: int = 16
    groups: int = 12
    # How likely the next position is looked at, too.
    patience: float = 0.85
    # Of taking: logistic(slope * (cosine - middle) - fatigue * impressions, each halving in a day).
    slope: float = 8.0
    middle: float = 0.75
    fatigue: float = 0.7
    # Below this cosine what was looked at is hidden with this probability; people's tastes are what it says.
    hide_below: float = 0.35
    hides: float = 0.3
    # Noise of what the system knows: of a person, a known item, and a new one by its text.
    person_noise: float = 0.7
    known_noise: float = 0.2
    new_noise: float = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a system does with what it saw."""

    # Hides lead a person's state away; without, they are interactions like any other.
    knows_actions: bool = True
    impression_discount: float = 0.0
    new_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Per answer: items taken, hidden, and taken of those that came within a day."""

    taken: float
    hidden: float
    new_taken: float


def run(world: World, policy: Policy, seed: int) -> Outcome:
    """Days of answers. Equal seeds make equal people, items and noise; what people do is drawn as it comes."""
    rng = np.random.default_rng(seed)
    chance, slots_rng = np.random.default_rng((seed, 1)), Random(seed)
    centres = _unit(rng.normal(size=(world.groups, world.width)))
    total = world.items + world.new_a_day * world.days
    people = _unit(centres[rng.integers(world.groups, size=world.people)] + 0.5 * _noise(rng, world.people, world))
    items = _unit(centres[rng.integers(world.groups, size=total)] + 0.5 * _noise(rng, total, world))
    noise = np.where(np.arange(total) < world.items, world.known_noise, world.new_noise)[:, None]
    known = _unit(items + noise * _noise(rng, total, world))
    states = _unit(people + world.person_noise * _noise(rng, world.people, world))
    cosines = people @ items.T
    evidence = np.where(np.arange(total) < world.items, 20.0, 1.0)
    had = np.zeros((world.people, total), dtype=bool)
    # Impressions, each worth a half a day later: as of the answer at hand.
    seen = np.zeros((world.people, total))
    fades = float(discount(_DAY_S / world.answers_a_day, each=1.0, half_life_s=_DAY_S))
    taken = hidden = new_taken = answers = 0
    for turn in range(world.days * world.answers_a_day):
        here = world.items + world.new_a_day * (turn // world.answers_a_day + 1)
        newest = range(here - world.new_a_day, here)
        seen *= fades
        for person in chance.permutation(world.people):
            shown = _answer(
                world, policy, known[:here] @ states[person], had[person, :here], seen[person], newest, slots_rng
            )
            looked = shown[: 1 + _looks(chance, world, len(shown))]
            of = cosines[person, looked]
            odds = world.slope * (of - world.middle) - world.fatigue * seen[person, looked]
            takes = chance.random(len(looked)) < 1 / (1 + np.exp(-odds))
            turned_down = ~takes & (of < world.hide_below) & (chance.random(len(looked)) < world.hides)
            seen[person, looked] += 1
            answers += 1
            taken += int(takes.sum())
            hidden += int(turned_down.sum())
            new_taken += int((takes & (looked >= newest.start)).sum())
            for item in looked[takes]:
                _learn(known, states, evidence, person, item)
            for item in looked[turned_down]:
                step = -4 * STEP if policy.knows_actions else 0.1
                states[person] = _unit(states[person] + step * known[item])
            had[person, looked[takes | turned_down]] = True
    return Outcome(taken=taken / answers, hidden=hidden / answers, new_taken=new_taken / answers)


def _answer(
    world: World, policy: Policy, scores: Floats, had: npt.NDArray[np.bool_], seen: Floats, newest: range, rng: Random
) -> npt.NDArray[np.int64]:
    scores = np.where(had, -np.inf, scores - policy.impression_discount * seen[: len(scores)])
    order = np.argsort(-scores, kind="stable")[: world.k]
    if not policy.new_share:
        return order
    fresh = [item for item in newest if not had[item] and item not in order]
    fresh.sort(key=lambda item: -scores[item])
    slots = draw_slots(len(order), len(fresh[:20]), policy.new_share, rng)
    return np.array([order[row] if row >= 0 else fresh[-1 - row] for row in slots.rows])


def _looks(chance: np.random.Generator, world: World, most: int) -> int:
    return min(most, int(chance.geometric(1 - world.patience))) - 1


def _learn(known: Floats, states: Floats, evidence: Floats, person: int, item: int) -> None:
    """What taking teaches: the item moves to who took it, the less the more is known of it; the person to the item."""
    before = states[person].copy()
    states[person] = _unit(states[person] + 0.1 * known[item])
    evidence[item] += 1
    known[item] = _unit(known[item] + (before - known[item]) / evidence[item])


def _noise(rng: np.random.Generator, rows: int, world: World) -> Floats:
    return np.asarray(rng.normal(size=(rows, world.width)) / np.sqrt(world.width))


def _unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12))
