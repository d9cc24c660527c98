"""A good record among the dead letters is not lost: commands show it and bring it back."""

import pytest
from typer.testing import CliRunner

from services.cli.main import app


@pytest.mark.parametrize("action", ["list", "show", "replay"])
def test_dead_letters_can_be_listed_shown_and_replayed(action: str) -> None:
    result = CliRunner().invoke(app, ["dead-letters", action, "--help"], env={"TERM": "dumb", "NO_COLOR": "1"})
    assert (result.exit_code, "No such command" in result.output) == (0, False)
