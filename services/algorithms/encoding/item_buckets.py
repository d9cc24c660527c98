"""Which hash bucket stands for an item that training never saw, wherever a history holds one.

The encoder then knows that something was watched, when, and roughly what share of unseen items it belongs to; it never
learns it from other users' states, so forgetting stays exact. Training replaces a small share of items by their
buckets, so that the bucket rows are learned. Training and serving ask here, and nobody else states the rule.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt


def item_bucket(item_id: str, num_buckets: int) -> int:
    """The bucket of an item id, in [0, num_buckets); the same on every machine and in every process."""
    digest = blake2b(item_id.encode(), digest_size=8, person=b"item-bucket").digest()
    return int.from_bytes(digest, "little") % num_buckets


def item_buckets(item_ids: Sequence[str], num_buckets: int) -> npt.NDArray[np.int64]:
    """The bucket of each item id (X,)."""
    return np.array([item_bucket(item_id, num_buckets) for item_id in item_ids], dtype=np.int64)
