"""Runs `freshet` in this process, on a terminal of 400 columns."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from services.cli.main import app


def run(*arguments: object, **variables: str) -> Result:
    """Run a command with further environment variables. An error that it does not report fails the test."""
    environment = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb", **variables}
    result = CliRunner().invoke(app, list(map(str, arguments)), env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def shown(*arguments: object, **variables: str) -> str:
    """Return what a command prints that succeeds."""
    result = run(*arguments, **variables)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(*arguments: object) -> Any:
    """Return the JSON of a command that succeeds."""
    return json.loads(shown(*arguments, "--json"))


def refused(status: int, *arguments: object, **variables: str) -> str:
    """Return what a command says that ends with this exit status."""
    result = run(*arguments, **variables)
    assert result.exit_code == status, result.output
    return result.output
