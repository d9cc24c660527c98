"""Where data is looked for, in which order, and what the source sentence says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.offline.datasets import DatasetUnavailableError, load_dataset
from services.offline.datasets.locate import Locator

WriteSet = Callable[[Path], Path]


def test_auto_falls_back_to_the_simulator_and_says_so(tmp_path: Path) -> None:
    data = load_dataset("auto", root=tmp_path)
    assert data.name == "simulator"
    assert "no real people" in data.source
    assert f"{tmp_path} has no ml-1m" in data.source


def test_auto_prefers_ml_1m(tmp_path: Path, write_ml_1m: WriteSet) -> None:
    write_ml_1m(tmp_path / "ml-100k")
    write_ml_1m(tmp_path / "ml-1m")
    assert load_dataset("auto", root=tmp_path).name == "ml-1m"


def test_freshet_data_comes_first_and_is_named(tmp_path: Path, write_ml_1m: WriteSet) -> None:
    write_ml_1m(tmp_path / "ml-1m")
    data = load_dataset("ml-1m", environ={"FRESHET_DATA": str(tmp_path)}, download=False)
    assert f"in FRESHET_DATA ({tmp_path})" in data.source
    assert len(data) == 4


def test_the_cache_is_the_last_local_place(tmp_path: Path, write_ml_1m: WriteSet) -> None:
    write_ml_1m(tmp_path / "freshet" / "data" / "ml-25m")
    data = load_dataset("ml-25m", environ={"XDG_CACHE_HOME": str(tmp_path)}, download=False)
    assert "in the local cache" in data.source


def test_a_set_asked_for_by_name_is_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(DatasetUnavailableError, match=r"ml-1m could not be had: .* has no ml-1m.*FRESHET_DATA"):
        load_dataset("ml-1m", root=tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DatasetUnavailableError, match=r"data='netflix' .*allowed: auto, simulator, ml-1m"):
        load_dataset("netflix", root=tmp_path)


def test_a_folder_path_is_read_as_movielens(tmp_path: Path, write_ml_1m: WriteSet) -> None:
    folder = write_ml_1m(tmp_path / "mine")
    assert load_dataset(folder).name == "mine"


def test_a_table_path_goes_to_the_generic_reader(tmp_path: Path) -> None:
    table = tmp_path / "clicks.csv"
    table.write_text("user,item,timestamp\na,x,1700000000\n")
    assert load_dataset(str(table)).name == "clicks"


def test_a_root_keeps_off_the_network(tmp_path: Path) -> None:
    assert Locator(root=tmp_path).from_publisher("ml-1m") is None
