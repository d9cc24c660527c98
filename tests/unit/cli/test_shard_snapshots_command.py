"""`freshet shard-snapshots` without what it needs: one sentence that names the setting, and the right exit status."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.offline.bundles.model import write_bundle
from tests.unit.bundle.bundle_scene import content


def run(folder: Path, *arguments: str, **settings: str) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **settings}
    bundle = write_bundle(folder / "bundle", content()).path
    words = ["shard-snapshots", str(folder / "snapshots"), "--bundle", str(bundle), "--kafka", "127.0.0.1:9"]
    return CliRunner().invoke(app, [*words, *arguments], env=environment)


@pytest.mark.parametrize("shards", ["0", "257"])
def test_a_number_of_shards_out_of_range_is_a_usage_error(tmp_path: Path, shards: str) -> None:
    assert run(tmp_path, "--shards", shards).exit_code == 2


def test_with_a_memory_there_are_no_snapshots(tmp_path: Path) -> None:
    result = run(tmp_path, "--shards", "2", FRESHET_CANDIDATES_VOTE_NEIGHBOURS="8")
    assert result.exit_code == 1
    assert "FRESHET_CANDIDATES_VOTE_NEIGHBOURS=8 allowed: 0" in result.output


def test_without_kafka_nothing_is_written(tmp_path: Path) -> None:
    assert run(tmp_path, "--shards", "2").exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
