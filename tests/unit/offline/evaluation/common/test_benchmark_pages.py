"""Every page of docs/benchmarks says what the stored figures beside it say; a template is filled as it is written."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from services.offline.demo.plots import LABELS
from services.offline.evaluation.common.report import Report, cell, filled
from services.offline.evaluation.generation.rows import page as generation_page
from services.offline.evaluation.large.gaps import page as gaps_page
from services.offline.evaluation.large.processes import page as large_shards_page
from services.offline.evaluation.large.rows import page as large_page
from services.offline.evaluation.pefa.report import page as pefa_page
from services.offline.evaluation.quality.page import page as quality_page
from services.offline.evaluation.quality.published import page as published_page
from services.offline.evaluation.retrieval.rows import page as retrieval_page
from services.offline.evaluation.retrieval.universality import page as universality_page
from services.offline.evaluation.stream.page import page as freshness_page

DOCS = Path(__file__).resolve().parents[5] / "docs" / "benchmarks"
PAGES: dict[str, Callable[[Report], str]] = {
    "freshness": freshness_page,
    "gaps": gaps_page,
    "generation": generation_page,
    "large-catalogues": large_page,
    "large-shards": large_shards_page,
    "pefa": pefa_page,
    "published": published_page,
    "quality": quality_page,
    "retrieval": retrieval_page,
    "universality": universality_page,
}


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


def test_what_pages_say_of_the_demo_is_its_json(render: ModuleType) -> None:
    """After a new demo.json: `python docs/benchmarks/render.py --redraw`."""
    demo = render.read("demo.json")
    assert len(render.MARKED) == 2
    for path in render.MARKED:
        text = path.read_text(encoding="utf-8")
        assert render.marked(text, demo) == text
        other = render.marked(text, demo | {"hit_rate_at_10": dict.fromkeys(demo["hit_rate_at_10"], 0.4321)})
        assert ".4321" in other
    assert f"<!--{{demo.freshness_ms.p99:.0f}}-->{demo['freshness_ms']['p99']:.0f}<!--/--> ms (p99)" in (
        DOCS.parents[1] / "README.md"
    ).read_text(encoding="utf-8")


def test_the_demos_pictures_are_of_the_run_of_its_json(render: ModuleType) -> None:
    demo = render.read("demo.json")
    names = {label: name for name, label in LABELS.items()}
    described = Image.open(DOCS / "hit_rate.png").text["Description"].split("; ")
    assert described[0].startswith(LABELS["model"])
    for shown in described:
        label = shown.partition(" (")[0]
        assert shown == f"{label} ({demo['hit_rate_at_10'][names[label]]:.3f} overall)"
    latency = [
        f"{share} {demo[of][share]:.0f} ms"
        for of in ("recommend_ms", "freshness_ms")
        for share in ("p50", "p95", "p99")
    ]
    assert Image.open(DOCS / "latency.png").text["Description"].split("; ") == latency


@pytest.mark.parametrize("subject", PAGES)
def test_the_published_page_of_a_subject_is_its_json(subject: str) -> None:
    report = json.loads((DOCS / f"{subject}.json").read_text(encoding="utf-8"))
    assert (DOCS / f"{subject}.md").read_text(encoding="utf-8") == PAGES[subject](report).rstrip() + "\n"


def test_a_template_shows_a_missing_part_as_a_dash_and_refuses_a_missing_value(tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    row = '| {{ row.a.b | cell(".1f") }}{{ row.sd | cell("±.2f") }} |'
    template.write_text("# {{ name }}\n\n{% for row in rows %}\n" + row + "\n{% endfor %}\n\n\n{{ list }}\n")
    rows = [{"a": {"b": 1}, "sd": 0.25}, {"a": None, "sd": None}]
    page = filled(template, name="{{ rows }}", rows=rows, list=["one", "two"])
    assert page == "# {{ rows }}\n\n| 1.0 ± 0.25 |\n| – |\n\none\ntwo\n"
    with pytest.raises(KeyError, match="needs list, rows"):
        filled(template, name="n")


def test_cells_are_short() -> None:
    shown = [
        cell(1234.5, "short"),
        cell(0.123456, "short"),
        cell([0.5, 0.25, 1.0], "+interval"),
        cell(2_500_000, "M.1f"),
    ]
    assert shown == ["1,234", "0.123", "+0.5000 [+0.2500, +1.0000]", "2.5"]
    assert [cell(None), cell(12_345), cell(True), cell({"a": None})] == ["–", "12,345", "True", "a –"]
    assert [cell(["a line", "another"]), cell([0.5, 1.5])] == ["a line\nanother", "[0.5, 1.5]"]


def test_the_best_baseline_stands_beside_the_model(render: ModuleType) -> None:
    demo = json.loads((DOCS / "demo.json").read_text(encoding="utf-8"))
    shown = {row["says"].split(",")[0]: row for row in render.hit_rates(demo)}
    assert f"{shown['the model']['over_item_knn']:.2f}" == f"{demo['over_best_baseline']['factor']:.2f}"
