"""Small data with an order worth learning, and a small configuration that learns it in seconds."""

from dataclasses import replace

import numpy as np

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.offline.datasets import Interactions
from services.offline.training import TrainConfig
from services.offline.training.models.mol import Dropouts

CONFIG = TrainConfig(
    encoder=EncoderShape(
        kind="hstu", num_blocks=1, num_heads=2, width=16, d_qk=8, d_v=8, max_history=16, num_time_buckets=32
    ),
    head=HeadShape(
        kind="mol", num_query_components=2, num_item_components=2, component_width=8, tau=0.05, gate_hidden=8
    ),
    epochs=3,
    dropouts=Dropouts(encoder=0.1, item=0.1, gate=0.1),
    num_negatives=8,
    batch_sequences=16,
    learning_rate=5e-3,
    warmup_fraction=0.1,
    final_rate_fraction=0.1,
)
WITH_USERS = replace(
    CONFIG,
    encoder=replace(CONFIG.encoder, uses_user_index=True),
    dropouts=replace(CONFIG.dropouts, user=0.5),
    user_norm_weight=0.1,
)


def cyclic_interactions(num_users: int = 40, num_items: int = 30, *, seed: int = 0, events: int = 1200) -> Interactions:
    """Each user walks through the items in order from a random start, so the next item follows from the last."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, num_users, events).astype(np.int32)
    start = rng.integers(0, num_items, num_users)
    seen = np.zeros(num_users, dtype=np.int64)
    items = np.zeros(events, dtype=np.int32)
    for row, user in enumerate(users):
        items[row] = (start[user] + seen[user]) % num_items
        seen[user] += 1
    return Interactions(
        users=users,
        items=items,
        timestamps=np.sort(rng.integers(10**9, 10**9 + 10**6, events)),
        values=np.ones(events, dtype=np.float32),
        types=np.zeros(events, dtype=np.int16),
        user_ids=[f"user-{user}" for user in range(num_users)],
        item_ids=[f"item-{item}" for item in range(num_items)],
        type_names=["interaction"],
        titles=[f"Item {item}" for item in range(num_items)],
        categories=[("even",) if item % 2 == 0 else ("odd",) for item in range(num_items)],
        name="cyclic",
        source="made for tests",
    )
