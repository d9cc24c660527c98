"""The site of `make docs`: its menu names pages that exist, and the generated pages hold what the code holds."""

import re
import sys
from typing import Any

import pytest
import typer.main
import yaml
from documentation import ROOT

from services.cli.main import app

sys.path.insert(0, str(ROOT / "deploy" / "site"))
import notebooks
import reference

GENERATED = {"index.md", "reference/settings.md", "reference/commands.md", "reference/api.md"} | {
    f"guide/notebooks/{name}.md" for name in notebooks.NAMES
}
FOLDERS = {"operate/runbooks", "benchmarks", "decisions"}


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which only mkdocs calls."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def pages(entries: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages(value) if isinstance(value, list) else [value]
    return found


def test_the_menu_names_every_page_of_the_three_folders_once() -> None:
    named = pages(SITE["nav"])
    assert len(named) == len(set(named))
    written = {
        path.relative_to(ROOT / "docs").as_posix()
        for folder in ("guide", "operate", "reference")
        for path in (ROOT / "docs" / folder).glob("*.md")
    }
    assert set(named) == written | GENERATED | FOLDERS | {"project"}
    assert all((ROOT / "docs" / folder).is_dir() for folder in FOLDERS)


def test_nothing_of_an_opened_page_comes_from_another_host() -> None:
    assert SITE["theme"]["font"] is False
    assert SITE.keys().isdisjoint({"repo_url", "extra_css", "extra_javascript"})
    assert "mermaid" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_settings_page_has_every_variable_of_a_process() -> None:
    page = reference.settings_page()
    configs = "".join((ROOT / "services" / name / "config.py").read_text() for name in reference.CONFIGS.values())
    named = set(re.findall(r'validation_alias="(FRESHET_\w+)"', configs))
    assert len(named) > 40
    assert set(re.findall(r"^\| `(FRESHET_\w+)` \|", page, re.MULTILINE)) >= named
    assert "| `FRESHET_GATEWAY_COLD_ITEMS` | `10` | integer, ≥ 0, ≤ 1,000 | Popular items get a higher score" in page


def test_the_commands_page_has_every_command() -> None:
    page = reference.commands_page()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert (f"\n## freshet {name}\n" in page) == (not command.hidden), name


@pytest.mark.parametrize(
    "what", ["### GatewayService\n", "| `Recommend` | RecommendRequest |", "| `user_id` | string |"]
)
def test_the_api_page_has_services_methods_and_fields(what: str) -> None:
    assert what in reference.api_page()
