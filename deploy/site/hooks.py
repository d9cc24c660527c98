"""What `make docs` adds to the folder docs: generated pages, README.md and its siblings, folders in the menu.

Links are written for the repository. One to a page of the site stays a link; one to any other file becomes the file's
path, because the site has no copy of it.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # mkdocs imports this file by its path

import notebooks  # noqa: E402
import reference  # noqa: E402

# Pages of the site whose text is another file's: page below docs -> file of the repository.
COPIED = {"index.md": "README.md"} | {
    f"project/{name.lower()}": name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
COPIED |= {
    f"project/{path.parent.relative_to(ROOT).as_posix().replace('/', '-')}.md": path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("services/*/README.md"), *ROOT.glob("services/*/*/README.md")])
    + [ROOT / name / "README.md" for name in ("deploy/chart", "loadtest", "tests", "tests/chaos")]
}
MADE = {
    "reference/settings.md": reference.settings_page,
    "reference/commands.md": reference.commands_page,
    "reference/api.md": reference.api_page,
}
PAGE_OF = {path: page for page, path in COPIED.items()} | {
    "docs/decisions": "decisions/README.md",
    "docs/benchmarks": "benchmarks/README.md",
}
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the menu names the folder."""
    config.nav = [_expanded(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs does not hold."""
    for page, path in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for page, made in MADE.items():
        files.append(File.generated(config, page, content=made()))
    for name in notebooks.NAMES:
        page = f"guide/notebooks/{name}.md"
        files.append(File.generated(config, page, content=notebooks.markdown(notebooks.FOLDER / f"{name}.ipynb")))
    if files.get_file_from_path("decisions/README.md") is None:
        files.append(File.generated(config, "decisions/README.md", content=_decisions()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and name files that are none."""
    here = COPIED.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))  # noqa: PTH118, PTH120
        found = PAGE_OF.get(path) or path.removeprefix("docs/").replace(".ipynb", ".md")
        if files.get_file_from_path(found) is not None:
            return f"{picture}[{text}]({os.path.relpath(found, os.path.dirname(page.file.src_uri) or '.')}{anchor})"  # noqa: PTH120
        if not (ROOT / path).exists():
            return link[0]  # mkdocs names it
        return f"{text} (`{path}`)" if path not in text else text

    parts, end = [], 0
    for block in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])


def _expanded(entry: Any) -> Any:
    """A menu entry whose value names a folder, with the folder's pages in its place."""
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [_expanded(one) for one in value]}
    if value.endswith(".md"):
        return entry
    if value == "decisions":
        return {title: "decisions/README.md"}
    if value == "project":
        return {title: [page for page in COPIED if page.startswith("project/")]}
    found = sorted(path for path in (ROOT / "docs" / value).glob("*.md"))
    first = [path for path in found if path.name == "README.md"]
    return {title: [f"{value}/{path.name}" for path in [*first, *(path for path in found if path not in first)]]}


def _decisions() -> str:
    lines = ["# Decisions", "", "What was decided, and why; failed ideas included.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
