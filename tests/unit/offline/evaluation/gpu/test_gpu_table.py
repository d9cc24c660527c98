"""The GPU table's whole path on a small catalogue, with the CPU as the card: what a lent card must not be wasted on."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from services.cli.main import app
from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.gpu.rates import STAND_IN, wall_clock
from services.offline.evaluation.gpu.table import NO_CARD, Card, algorithms, shape_rows, table_line

SMALL = Shape(
    name="books", num_items=900, num_query_components=2, num_item_components=2, component_width=16, gate_hidden=8
)


def test_every_algorithm_has_a_row_per_batch_and_proofs_are_right() -> None:
    card = Card(device=torch.device("cpu"), rates=STAND_IN, clock=wall_clock)
    rows = list(shape_rows(SMALL, card, (4, 1), seed=0, quick=True))
    assert not [row for row in rows if "error" in row]
    names = {row["algorithm"] for row in rows}
    assert {one.name for one in algorithms(SMALL.num_items)} <= names
    for row in rows:
        assert row["milliseconds"] > 0
        assert row["speedup"] > 0
        assert table_line(row)
    rivals = {row["algorithm"]: row["recall_100"] for row in rows if row["algorithm"].endswith("torch.compile")}
    assert rivals["plain PyTorch, float32, torch.compile"] == 1
    assert rivals["plain PyTorch, float16, torch.compile"] > 0.98
    measured = [row for row in rows if "wrong_proofs" in row]
    assert {row["batch"] for row in measured} == {1, 4}
    for row in measured:
        assert row["wrong_proofs"] == 0
        assert row["floor_ratio"] > 0
        assert 0 < row["recall_100"] <= 1
    exact = [row for row in measured if row["algorithm"].startswith("brute_force")]
    assert all(row["recall_100"] == row["exact"] == 1 for row in exact)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: the table would be measured")
def test_without_a_card_the_command_says_so_and_fails() -> None:
    result = CliRunner().invoke(app, ["bench", "gpu", "--shape", "books"])
    assert result.exit_code == 3
    assert NO_CARD in result.stderr


@pytest.mark.parametrize(
    ("shape", "status", "said"),
    [("nowhere", 2, "shape='nowhere'; allowed: ml-1m, ml-20m, books, nq320k"), ("ml-1m", 0, "")],
)
def test_the_command_needs_no_package_that_a_lent_card_lacks(shape: str, status: int, said: str) -> None:
    absent = ("structlog", "pyarrow", "yaml", "safetensors", "grpc", "pydantic_settings", "scipy", "psutil")
    nothing_measured = "from services.offline.evaluation.gpu import table; table.shape_rows = lambda *_, **__: iter(())"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); {nothing_measured}"
    command = [sys.executable, "-c", f"{code}; from services.cli.main import main; main()", "bench", "gpu"]
    done = subprocess.run([*command, "--device", "cpu", "--shape", shape], capture_output=True, text=True, check=False)
    assert said in done.stderr
    assert done.returncode == status, done.stderr[-2000:]
