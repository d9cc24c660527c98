"""User and item ids for a scenario, from the caller's files or generated.

An item table is Arrow or Parquet with item_id and optionally count (events then follow the real popularity), or a text
file with one id per line.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file

_DRAWN_AT_ONCE = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """user_ids and item_ids to draw from; item_weights (X,) sum to 1."""

    user_ids: list[str]
    item_ids: list[str]
    item_weights: npt.NDArray[np.float64]

    @classmethod
    def made_up(cls, num_users: int, items: Path) -> "Population":
        """Return the load test's own users, with the items of a file. Raises: as `read_items`."""
        item_ids, weights = read_items(items)
        return cls(user_ids=made_up_users(num_users), item_ids=item_ids, item_weights=weights)


def read_items(path: Path) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Return item ids and their draw probabilities. `path`: items.arrow, a bundle folder, or a text file.

    Raises: ValueError naming the path if nothing is usable.
    """
    if path.is_dir():
        path = path / "items.arrow"
    table = _read_ids(path, "item_id")
    item_ids: list[str] = table["item_id"].to_pylist()
    if "count" in table.column_names:
        weights = table["count"].to_numpy().astype(np.float64) + 1.0
    else:
        weights = np.ones(len(item_ids))
    return item_ids, weights / weights.sum()


def read_users(path: Path) -> list[str]:
    """Return user ids from users.parquet (user_id) or a text file. Raises: ValueError naming the path."""
    user_ids: list[str] = _read_ids(path, "user_id")["user_id"].to_pylist()
    return user_ids


def made_up_users(number: int) -> list[str]:
    """Return the load test's own users: their events do not change real users' histories."""
    return [f"loadtest-{row}" for row in range(number)]


def title_words(path: Path) -> list[list[str]]:
    """Return the words of each title. Raises: ValueError naming the path if there are no titles."""
    path = path / "items.arrow" if path.is_dir() else path
    try:
        table = _read_table(path).select(["title"])
    except (OSError, pa.ArrowException, KeyError) as exc:
        raise ValueError(f"--items={path} has no titles to take words from: {exc}; --queries names a file") from exc
    titles = [(title or "").split() for title in table["title"].to_pylist()]
    words = [[word for word in title if not word.startswith("(")] for title in titles]
    found = [title for title in words if title]
    if not found:
        raise ValueError(f"--items={path} has no titles to take words from; --queries names a file")
    return found


class Draws:
    """Draws users and weighted items in advance, since a NumPy call per item would cost more than the rest."""

    def __init__(self, population: Population, rng: np.random.Generator) -> None:
        self._population = population
        self._rng = rng
        self._cdf = np.cumsum(population.item_weights)
        self._stock: list[tuple[int, int]] = []

    def draw(self) -> tuple[str, str]:
        """Return one user and one item."""
        if not self._stock:
            users = self._rng.integers(0, len(self._population.user_ids), _DRAWN_AT_ONCE)
            items = np.minimum(np.searchsorted(self._cdf, self._rng.random(_DRAWN_AT_ONCE)), len(self._cdf) - 1)
            self._stock = list(zip(users.tolist(), items.tolist(), strict=True))
        user, item = self._stock.pop()
        return self._population.user_ids[user], self._population.item_ids[item]


def _read_table(path: Path) -> pa.Table:
    """Raises: OSError and ArrowException."""
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _read_ids(path: Path, column: str) -> pa.Table:
    if not path.is_file():
        raise ValueError(
            f"{path} is not there; name an Arrow or Parquet file with {column}, or a text file with one id per line"
        )
    if path.suffix in (".arrow", ".parquet"):
        try:
            table = _read_table(path)
        except (pa.ArrowException, OSError) as exc:
            raise ValueError(f"{path} cannot be read as {path.suffix[1:].title()}: {exc}") from exc
        if column not in table.column_names:
            raise ValueError(f"{path} has no column {column}; it has: {', '.join(table.column_names)}")
    else:
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        table = pa.table({column: pa.array([line for line in lines if line], pa.string())})
    if table.num_rows == 0:
        raise ValueError(f"{path} holds no {column}")
    return table


def read_vectors(bundle: Path) -> tuple[list[str], npt.NDArray[np.float32]]:
    """Return item ids and unit vectors (X, d). Raises: ValueError naming the path if nothing is usable."""
    path = bundle / "item_states.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{path} is not there; --items has to name a bundle folder, whose item states say what is near"
        )
    try:
        components = load_file(path)["components"]
    except (SafetensorError, KeyError, OSError) as exc:
        raise ValueError(f"{path} cannot be read: {exc}") from exc
    item_ids, _ = read_items(bundle)
    if len(item_ids) != len(components):
        raise ValueError(f"{path} has {len(components)} items, items.arrow has {len(item_ids)}; they must agree")
    vectors = components.mean(axis=1, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return item_ids, vectors / np.maximum(lengths, 1e-12)


def neighbourhoods(
    item_ids: list[str],
    vectors: npt.NDArray[np.float32],
    anchors: npt.NDArray[np.int64],
    *,
    size: int,
    among: npt.NDArray[np.int64],
) -> list[list[str]]:
    """Return the ids of each anchor's `size` nearest items by cosine out of `among`, the anchor included."""
    similar = vectors[anchors] @ vectors[among].T
    order = np.argsort(-similar, axis=1, kind="stable")[:, :size]
    return [[item_ids[row] for row in among[nearest].tolist()] for nearest in order]
