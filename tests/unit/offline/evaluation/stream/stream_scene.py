"""A small stream and untrained models for it: what a walk must keep to does not depend on having learnt."""

from collections.abc import Sequence

import numpy as np
import torch

from services.algorithms.bundles.model_manifest import AbsenceShape, EncoderShape, HeadShape
from services.offline.datasets import Interactions
from services.offline.training.models.sequential import SequentialModel

WINDOW = 8


def ordered_events(num_users: int = 12, num_items: int = 25, events: int = 240, *, seed: int = 3) -> Interactions:
    """People who take each item at most once, in a random order of their own."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(num_items) for _ in range(num_users)]
    taken = np.zeros(num_users, dtype=int)
    users, items = [], []
    while len(users) < events:
        user = int(rng.integers(num_users))
        if taken[user] < num_items:
            users.append(user)
            items.append(int(orders[user][taken[user]]))
            taken[user] += 1
    times, stars = np.sort(rng.integers(10**9, 10**9 + 10**6, events)), rng.integers(1, 6, events)
    return interactions_of(users, items, times, stars, (num_users, num_items))


def interactions_of(
    users: Sequence[int], items: Sequence[int], times: np.ndarray, stars: np.ndarray, sizes: tuple[int, int]
) -> Interactions:
    num_users, num_items = sizes
    return Interactions(
        users=np.array(users, dtype=np.int32),
        items=np.array(items, dtype=np.int32),
        timestamps=times,
        values=stars.astype(np.float32),
        types=np.zeros(len(users), dtype=np.int16),
        user_ids=[f"user-{user}" for user in range(num_users)],
        item_ids=[f"item-{item}" for item in range(num_items)],
        type_names=["rating"],
        titles=[""] * num_items,
        categories=[()] * num_items,
        name="orders",
        source="made for tests",
    )


def untrained(interactions: Interactions, *, seed: int, absence: AbsenceShape | None = None) -> SequentialModel:
    """A `Fit` that learns nothing; its rows of absence are random."""
    torch.manual_seed(seed)
    encoder = EncoderShape(
        kind="hstu",
        num_blocks=1,
        num_heads=1,
        width=8,
        d_qk=4,
        d_v=4,
        max_history=WINDOW,
        num_time_buckets=16,
    )
    head = HeadShape(
        kind="mol", num_query_components=2, num_item_components=2, component_width=6, tau=0.05, gate_hidden=5
    )
    model = SequentialModel(encoder, head, num_items=interactions.num_items, absence=absence).eval()
    if absence is not None:
        with torch.no_grad():
            model.absence_components[1:].normal_(std=0.3)
            model.absence_gate[1:].normal_(std=0.3)
    return model
