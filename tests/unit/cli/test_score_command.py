"""`freshet score` without what it needs: one sentence, the next step, and the right exit status."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.offline.bundles.model import write_bundle
from tests.unit.bundle.bundle_scene import content


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["score", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize(("k", "allowed"), [("0", "than or equal to 1 "), ("1001", "than or equal to 1000 ")])
def test_k_out_of_range_is_refused(tmp_path: Path, k: str, allowed: str) -> None:
    result = run("--out", str(tmp_path / "out"), "--k", k)
    assert result.exit_code == 2
    assert allowed in result.output


def test_users_without_the_column_are_refused_by_name(tmp_path: Path) -> None:
    users = tmp_path / "users.parquet"
    pq.write_table(pa.table({"person": ["a"]}), users)
    result = run("--out", str(tmp_path / "out"), "--users", str(users))
    assert result.exit_code == 2
    assert "column user_id" in result.output


def test_without_kafka_nothing_is_written(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", content()).path
    result = run("--out", str(tmp_path / "out"), "--bundle", str(bundle), "--kafka", "127.0.0.1:9")
    assert result.exit_code == 3
    assert "freshet up" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_help_says_what_differs_from_a_served_answer() -> None:
    shown = run("--help").output
    for word in ("no_state", "popular_not_boosted", "--on ray://head:10001"):
        assert word in shown
