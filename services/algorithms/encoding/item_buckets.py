"""Hash buckets for items in histories that training never saw.

So the encoder knows that an item was watched, when, and roughly which share of unseen items it belongs to. It learns
nothing from other users' states, so forgetting stays exact. Training replaces a small share of items by their buckets,
so that the bucket rows are learned. Training and serving both use this module.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt


def item_bucket(item_id: str, num_buckets: int) -> int:
    """Return the bucket of an item id, in [0, num_buckets); equal on every machine and in every process."""
    digest = blake2b(item_id.encode(), digest_size=8, person=b"item-bucket").digest()
    return int.from_bytes(digest, "little") % num_buckets


def item_buckets(item_ids: Sequence[str], num_buckets: int) -> npt.NDArray[np.int64]:
    """Return the bucket of each item id (X,)."""
    return np.array([item_bucket(item_id, num_buckets) for item_id in item_ids], dtype=np.int64)
