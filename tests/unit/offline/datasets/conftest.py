"""A four-event MovieLens-1M in the publisher's own format, for the tests that need one on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest

# user, item, rating, time: user 10 takes 2 and 30 in the same second, in file order.
ROWS = [(10, 2, 5, 978_300_100), (10, 30, 3, 978_300_100), (10, 1, 4, 978_300_050), (9, 2, 1, 978_300_075)]
RATINGS_DAT = "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in ROWS)
MOVIES_DAT = """1::Toy Story (1995)::Animation|Comedy
2::Misérables, Les (1995)::Drama
30::X (1990)::Drama
7::Nobody Rated This (1991)::Drama
"""


@pytest.fixture
def rating_rows() -> list[tuple[int, int, int, int]]:
    return ROWS


@pytest.fixture
def write_ml_1m() -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "ratings.dat").write_bytes(RATINGS_DAT.encode("latin-1"))
        (folder / "movies.dat").write_bytes(MOVIES_DAT.encode("latin-1"))
        return folder

    return write
