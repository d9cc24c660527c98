"""The pages that a reader meets first: their links lead somewhere, their commands parse."""

import re
from pathlib import Path

import pytest
from documentation import ROOT, Shown, broken_links, commands, parses

FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [
    *FRONT,
    *(page for folder in ("guide", "operate", "reference") for page in sorted((ROOT / "docs" / folder).rglob("*.md"))),
]
# Links are held in the pages of processes and decisions, too.
LINKED = [
    *PAGES,
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
    *sorted(path for path in (ROOT / "services").glob("**/README.md") if "node_modules" not in path.parts),
    ROOT / "loadtest" / "README.md",
    ROOT / "tests" / "README.md",
]

COMMANDS = [(page, shown) for page in PAGES for shown in commands(page.read_text(encoding="utf-8"))]


def name_of(value: object) -> str | None:
    if isinstance(value, Path):
        return str(value.relative_to(ROOT))
    return str(value) if isinstance(value, Shown) else None


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize(("page", "shown"), COMMANDS, ids=name_of)
def test_every_command_of_a_page_parses(page: Path, shown: Shown) -> None:
    parses(list(shown.words), whole=shown.whole)


@pytest.mark.parametrize(
    ("page", "heading"),
    [("docs/operate/security.md", "Each protection and its test"), ("tests/README.md", "Each promise and its test")],
)
def test_every_test_that_a_page_names_is_where_it_says(page: str, heading: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"## {heading}")[2]
    named = re.findall(r"\[([^\]]*`test_[^\]]*)\]\(([^)]+)\)", text)
    for names, path in named:
        defined = ((ROOT / page).parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in defined, name
    assert len(named) > 10
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    assert all(re.search(r"\]\([^)]+\.py\)", row) for row in rows)


def test_the_everyday_commands_are_found_in_the_pages() -> None:
    shown = {command.words[0] for _, command in COMMANDS}
    assert {"up", "down", "status", "doctor", "record", "recommend", "forget", "train", "import"} <= shown
    assert len(COMMANDS) > 50
