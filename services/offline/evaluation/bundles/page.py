"""The page of `freshet evaluate`: one HTML file with its plots inside."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from services.offline.evaluation.bundles.evaluate import MODEL
from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.engine.metrics import METRICS

Report = Mapping[str, Any]


def page(report: Report) -> str:
    """Return the HTML; ids and titles are escaped."""
    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    plots = [_scorers(report), _segments(report)] if report["segments"] else [_scorers(report)]
    pictures = [base64.b64encode(one).decode() for one in plots]
    return templates.get_template("page.html.jinja").render(**report, metric_names=METRICS, pictures=pictures)


def _scorers(report: Report) -> bytes:
    drawn = io.BytesIO()
    names = [row["name"] for row in report["rows"]]
    with panels(drawn, 1, 2, size=(4.6, 0.9 + 0.4 * len(names))) as both:
        for panel, metric in zip(both[0], ("hr@10", "ndcg@10"), strict=True):
            for place, row in enumerate(report["rows"]):
                mean, low, high = row["metrics"][metric]
                colour = "C0" if row["name"] == MODEL else "C7"
                panel.barh(place, mean, xerr=[[mean - low], [high - mean]], color=colour, capsize=3)
            titled(panel, metric.upper(), yticks=range(len(names)), yticklabels=names)
            panel.invert_yaxis()
    return drawn.getvalue()


def _segments(report: Report) -> bytes:
    drawn, rows = io.BytesIO(), report["segments"]
    names = [f"{row['question']}: {row['segment']}" for row in rows]
    with panels(drawn, 1, 1, size=(9.2, 1 + 0.34 * len(rows))) as one:
        panel = titled(one[0][0], "HR@10 by kind of event", yticks=range(len(names)), yticklabels=names)
        for number, name in enumerate(filter(None, (MODEL, report["best_baseline"]))):
            found = [row["values"][name]["hr@10"] for row in rows]
            places = [place + 0.25 * number - 0.12 for place in range(len(rows))]
            errors = [[mean - low for mean, low, _ in found], [high - mean for mean, _, high in found]]
            style = {"color": ("C0", "C7")[number], "label": name}
            panel.errorbar([mean for mean, _, _ in found], places, xerr=errors, fmt="o", capsize=3, **style)
        panel.invert_yaxis()
    return drawn.getvalue()
