"""Pages use the words of docs/reference/glossary.md. Code, links' targets and the exempt pages are not read."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = re.compile(
    r"\b(anew|made again|as it is|of whom|what there is|up to where|takes? over|taken over|took over|takes? back"
    r"|taken back|whoever|everybody|nobody|somebody|stands? behind|speaks? (?:of|for)|for good|beside|the door)\b",
    re.IGNORECASE,
)
# The glossary has the names that it replaces; the tables of the others are made by commands.
EXEMPT = {
    *("docs/reference/glossary.md", "docs/benchmarks/path.md", "docs/benchmarks/large-catalogues.md"),
    *("docs/operate/scale.md", "docs/benchmarks/large-shards.md"),
}
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def test_pages_avoid_banned_words() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in sorted(set(listed.split()) - EXEMPT):
        text = _CODE.sub(lambda code: "\n" * code[0].count("\n"), (ROOT / name).read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {word[0]!r}" for word in BANNED.finditer(line)]
    assert found == [], "words of docs/reference/glossary.md instead"
