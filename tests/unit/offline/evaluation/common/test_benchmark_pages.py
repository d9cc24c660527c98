"""docs/benchmarks/README.md says what the stored figures say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from services.offline.evaluation.text import page as text_page

DOCS = Path(__file__).resolve().parents[5] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_render", DOCS / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_page_is_its_json(render: ModuleType) -> None:
    measured = json.loads((DOCS / "machine.json").read_text(encoding="utf-8"))
    assert (DOCS / "README.md").read_text(encoding="utf-8") == render.page(measured)


def test_the_published_page_on_text_is_its_json() -> None:
    measured = json.loads((DOCS / "text.json").read_text(encoding="utf-8"))
    assert (DOCS / "text.md").read_text(encoding="utf-8") == text_page.text(measured).rstrip() + "\n"


def test_the_best_baseline_stands_beside_the_model(render: ModuleType) -> None:
    demo = json.loads((DOCS / "demo.json").read_text(encoding="utf-8"))
    (line,) = [line for line in render.hit_rate_table(demo) if line.startswith("| the model, states kept fresh")]
    assert line.split("|")[-2].strip() == f"{demo['over_best_baseline']['factor']:.2f}"
