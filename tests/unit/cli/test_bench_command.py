"""`freshet bench`: help that teaches, and wrong requests refused by name before anything is measured."""

import json

import pytest
from typer.testing import CliRunner

from services.cli.main import app

RUNNER = CliRunner()


@pytest.mark.parametrize("what", ["retrieval", "quantization", "mutation", "generation"])
def test_help_has_an_example(what: str) -> None:
    result = RUNNER.invoke(app, ["bench", what, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert f"freshet bench {what}" in result.output
    assert "--quick" in result.output


def test_an_unknown_shape_is_a_usage_error_that_names_the_known_ones() -> None:
    result = RUNNER.invoke(app, ["bench", "retrieval", "--shape", "netflix", "--json"])
    assert result.exit_code == 2
    report = json.loads(result.output.splitlines()[-1])
    assert "netflix" in report["error"]
    assert "books" in report["error"]


def test_a_bundle_without_its_shape_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["bench", "retrieval", "--shape", "books", "--bundle", "somewhere", "--json"])
    assert result.exit_code == 2
    assert "ml-1m" in json.loads(result.output.splitlines()[-1])["error"]


def test_an_unknown_device_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["bench", "retrieval", "--device", "tpu", "--json"])
    assert result.exit_code == 2
    assert "tpu" in json.loads(result.output.splitlines()[-1])["error"]
