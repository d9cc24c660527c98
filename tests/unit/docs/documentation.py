"""What the tests of the documentation share: pages, their links and anchors, and the commands that they show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer.main
from typer.core import TyperGroup

from services.cli.main import app

ROOT = Path(__file__).resolve().parents[3]

_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?freshet +(?P<words>.+)")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, without the program's name. `whole`: from a block, so that it can be copied."""

    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return shlex.join(self.words)


def links(text: str) -> list[str]:
    """Targets of the links and images outside code, those to other hosts left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text)))
    return sorted({target for target in found if "://" not in target and not target.startswith("mailto:")})


def anchors(text: str) -> set[str]:
    """The names that headings get on GitHub: lower case, no punctuation, hyphens for spaces, numbered when repeated."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (numbered := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(numbered)
    return found


def broken_links(page: Path) -> list[str]:
    """The links of a page whose file, or whose heading in a Markdown file, does not exist."""
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    return broken


def commands(text: str) -> list[Shown]:
    """Every `freshet ...` of a page, from its blocks and from code within its sentences, in order of appearance.

    One that is followed by "of commit" is that commit's, and left out.
    """
    blocks = [block[0] for block in _FENCE.finditer(text)]
    found = [shown for block in blocks for line in block.splitlines() for shown in _commands(line, whole=True)]
    for code, is_earlier in re.findall(r"`([^`]+)`(\s+of\s+commit\b)?", _FENCE.sub("", text)):
        found += [] if is_earlier else _commands(" ".join(code.split()), whole=False)
    return list(dict.fromkeys(found))


def _commands(line: str, *, whole: bool) -> Iterator[Shown]:
    for part in re.split(r"&&|;|\|(?!\|)", line):
        if match := _COMMAND.fullmatch(part.strip()):
            words = tuple(shlex.split(match["words"], comments=True))
            # A redirection is the shell's, and what follows it is no word of ours.
            yield Shown(words[: words.index(">")] if ">" in words else words, whole)


def parses(words: list[str], *, whole: bool = True) -> None:
    """Walk to the command and let it read its options, without running it.

    With `whole` false the name of a command or of a group is enough, as in a sentence.
    Raises: AssertionError for an unknown command, typer's usage errors for what the command does not take.
    """
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        if not words and not whole:
            return
        assert words, f"freshet {command.name} needs a command"
        name, *words = words
        if name.startswith("-"):
            assert any(name in option.opts for option in command.params) or name == "--help", f"no option {name}"
            return
        assert name in command.commands, f"freshet has no command {name!r} there"
        command = command.commands[name]
    if words or whole:
        command.make_context(command.name, list(words))
