"""Real embedding sets for the benchmark of codes: items and held-out queries, disjoint.

Slow vectors are cached under a fingerprint of their texts.

Letters: X items, B held-out queries, d width.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from services.algorithms.models.sentence_encoder import WIDTH, MiniLM, model_folder
from services.algorithms.scoring.states import FloatArray
from services.offline.datasets.locate import Locator


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSet:
    """Items (X, d) and queries (B, d), in float32."""

    name: str
    items: FloatArray
    queries: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSource:
    """The data folders, and a progress callback."""

    locator: Locator = field(default_factory=Locator)
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def kept(self, name: str) -> Path:
        """Return the path in the cache."""
        return self.locator.cache_dir() / "embeddings" / name


def minilm_queries(source: EmbeddingSource, *, seed: int, num_items: int | None = None) -> EmbeddingSet:
    """Return MiniLM vectors (d = 384, unit norm) of real search queries: 1,000 as queries and 135k as items.

    The first call takes 4.5 minutes on two cores with AVX-512, and stores 224 MB in the cache.
    Raises: ValueError if the model is not installed (with the command to run) or the file is missing.
    """
    texts = pq.read_table(source.locator.file("queries/queries.parquet"))["text"].to_pylist()
    return _split("minilm-queries", sentence_vectors(source, texts), 1_000, 11_000, num_items, seed)


def sentence_vectors(source: EmbeddingSource, texts: Sequence[str]) -> FloatArray:
    """Return MiniLM vectors (B, 384), unit norm, of B texts, from the cache, else computed at 500 short texts a second.

    Raises: ValueError if the model is not installed (with the command to run), or if cached vectors do not fit.
    """
    fingerprint = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    path = source.kept(f"minilm-{fingerprint}.npy")
    if path.is_file():
        vectors: FloatArray = np.load(path, mmap_mode="r")
    else:
        vectors = MiniLM(model_folder()).encode(
            texts, progress=lambda done: source.progress("MiniLM vectors", done, len(texts))
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{os.getpid()}-{path.name}")  # so that an interrupted run leaves no partial file
        try:
            np.save(aside, vectors)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    if vectors.shape != (len(texts), WIDTH):
        raise ValueError(f"{path} has shape {vectors.shape}; expected {(len(texts), WIDTH)}; delete it")
    return vectors


def sift(source: EmbeddingSource, *, seed: int) -> EmbeddingSet:
    """Return SIFT descriptors (d = 128), scaled by 1 / 512 to about unit norm: 500 as queries and 4,000 as items."""
    column = pq.read_table(source.locator.file("sift-5k/vectors.parquet"), columns=["vector"])["vector"]
    vectors = np.frombuffer(b"".join(column.to_pylist()), dtype=np.uint8).reshape(-1, 128).astype(np.float32)
    return _split("sift-5k", vectors / np.float32(512), 500, 1_000, None, seed)


def _split(
    name: str, vectors: FloatArray, num_queries: int, apart: int, num_items: int | None, seed: int
) -> EmbeddingSet:
    """Draw the queries from `apart` random vectors, and the items from the other vectors."""
    if len(vectors) <= apart:
        raise ValueError(f"{name} has {len(vectors)} vectors; {apart} queries leave no items")
    order = np.random.default_rng(seed).permutation(len(vectors))
    items = np.sort(order[apart:][:num_items])
    return EmbeddingSet(name=name, items=vectors[items], queries=vectors[order[:num_queries]])
