"""The columns of a table of recommendations. Each row is one user's top K, from the gateway or from a log."""

import pyarrow as pa

SCHEMA = pa.schema(
    {
        "user_id": pa.string(),
        "item_ids": pa.list_(pa.string()),
        "scores": pa.list_(pa.float64()),
        "source": pa.string(),
        "model_version": pa.string(),
        "index_version": pa.string(),
        "state_source": pa.string(),
        "state_partition": pa.int32(),
        "state_offset": pa.int64(),
        "absence_bucket": pa.int32(),
        "certificate": pa.string(),
        "gap": pa.float64(),
        "degradations": pa.list_(pa.string()),
    }
)
