"""docs/reference/papers.md: what was measured names its command; commands and files exist, but for an earlier commit's."""

import re
import shlex

import pytest
from documentation import ROOT, parses

PAGE = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
STATES = ("reproduced", "by proxy", "served", "not attempted", "–")

def rows(part: str) -> list[list[str]]:
    """The cells of a part's table, without its header."""
    lines = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


PARTS = {part.splitlines()[0]: rows(part) for part in PAGE.split("\n## ")[1:]}
COMMANDS = sorted(
    {
        code
        for cells in PARTS.values()
        for row in cells
        for code, is_earlier in re.findall(r"`([^`]+)`( of commit [0-9a-f]{8})?", row[-1])
        if " " in code and not is_earlier
    }
)


def test_every_row_has_five_cells_and_a_known_state() -> None:
    for title, cells in PARTS.items():
        assert cells, title
        for row in cells:
            assert len(row) == 5, row
            assert row[3].startswith(STATES), row


def test_what_was_measured_names_its_command() -> None:
    for cells in PARTS.values():
        for row in cells:
            if row[3].startswith(("reproduced", "by proxy", "served")):
                assert re.search(r"`(freshet|pytest) ", row[4]), row


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "pytest":
        assert all((ROOT / word).is_file() for word in words)
    else:
        assert program == "freshet"
        parses(words)
