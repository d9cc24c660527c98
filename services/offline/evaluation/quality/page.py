"""The comparison's page: tables from the report's sections into a template, and the learning curves as a plot.

The sentences are in page.template.md; here are cells. It measures nothing.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.quality import table

matplotlib.use("Agg")  # no window, wherever it runs

from matplotlib import pyplot as plt

from services.offline.evaluation.common.report import filled, markdown
from services.offline.evaluation.quality.arms import ARMS, NUM_TRIALS, Trial

Row = Mapping[str, Any]

_TEMPLATE = Path(__file__).with_name("page.template.md")
_METRICS = (("hr@1", "HR@1"), ("hr@10", "HR@10"), ("hr@50", "HR@50"), ("hr@200", "HR@200"))
_MISSING = "–"


def page(report: Mapping[str, Any]) -> str:
    """quality.md of a report (see `table.report`), with `command` and `machine`."""
    sections = report["sections"]
    done = sum(section["finals"]["done"] for section in sections)
    expected = sum(section["finals"]["expected"] for section in sections)
    progress = "The table is complete." if done >= expected else f"{done} of {expected} final runs are done so far."
    return filled(
        _TEMPLATE,
        num_trials=NUM_TRIALS,
        command=report["command"],
        machine=report["machine"],
        progress=progress,
        sections=[line for section in sections for line in _section(section)],
    )


def plot_curves(report: Mapping[str, Any], path: Path) -> None:
    """Validation NDCG@10 against processor seconds of training, one panel per split that has a curve."""
    sections = [section for section in report["sections"] if section["curves"]]
    figure, panels = plt.subplots(
        1, max(1, len(sections)), figsize=(4.2 * max(1, len(sections)), 3.6), squeeze=False, constrained_layout=True
    )
    for panel, section in zip(panels[0], sections, strict=False):
        for number, (name, arm) in enumerate(ARMS.items()):
            for seed, curve in enumerate(section["curves"].get(name, [])):
                seconds, values = [point[0] for point in curve], [point[1] for point in curve]
                style = "-" if arm.is_mixture else "--"
                panel.plot(seconds, values, style, color=f"C{number}", lw=1, label=arm.title if seed == 0 else None)
        panel.set_title(f"{section['data']}\n{section['split']}", fontsize=9)
        panel.set_xlabel("processor seconds")
        panel.set_ylabel("validation NDCG@10")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _section(section: Row) -> list[str]:
    lines = [f"## {section['data']}, {section['split']}", "", _facts(section), ""]
    if not section["rows"]:
        return [*lines, "Not measured yet.", ""]
    header = ("", "seeds", *(title for _, title in _METRICS), "NDCG@10", "MRR", "coverage@10", "minutes", "bytes/item")
    ordered = sorted(section["rows"], key=lambda row: -row["ndcg@10"])
    lines += [*markdown(header, (_cells(row) for row in ordered)), ""]
    if section["verdicts"]:
        header = ("difference on the test", "of", "minus", "metric", "mean [95 %]", "p (Holm)")
        lines += [*markdown(header, (_verdict_cells(verdict) for verdict in section["verdicts"])), ""]
    if section["strata"]:
        lines += [*_strata_lines(section["strata"]), ""]
    if section["trials"]:
        header = ("trial of", "setting", "validation NDCG@10", "epochs", "minutes")
        lines += ["<details><summary>Trials</summary>", "", *markdown(header, map(_trial_cells, section["trials"]))]
        lines += ["", "</details>", ""]
    return lines


def _facts(section: Row) -> str:
    order = section["order"]
    told = ""
    if order is not None:
        told = f" Shuffle test: {order['verdict']} (next-item hits {order['lift']:g} × shuffled, z {order['z']:g})."
    return (
        f"{section['users']:,} users, {section['items']:,} items, {section['train_events']:,} training events, "
        f"{section['test_events']:,} test events.{told}"
    )


def _cells(row: Row) -> list[str]:
    name = f"**{row['title']}**" if row["arm"] in ARMS else row["title"]
    return [
        f"{name} ({row['chosen']})" if row["arm"] in ARMS else name,
        str(row["seeds"]),
        *(_with_spread(row, metric) for metric, _ in _METRICS),
        _with_spread(row, "ndcg@10"),
        _with_spread(row, "mrr"),
        f"{row['coverage']:.2f}",
        f"{row['cpu_seconds'] / 60:.1f}",
        _MISSING if row["bytes_per_item"] is None else str(row["bytes_per_item"]),
    ]


def _with_spread(row: Row, metric: str) -> str:
    deviation = row[f"{metric}_sd"]
    return _short(row[metric]) + ("" if deviation is None else f" ± {_short(deviation)}")


def _short(value: float) -> str:
    return f"{value:.4f}".replace("0.", ".", 1)


def _verdict_cells(verdict: Row) -> list[str]:
    return [
        verdict["question"],
        verdict["one"],
        verdict["other"],
        verdict["metric"].upper(),
        f"{verdict['mean']:+.4f} [{verdict['low']:+.4f}, {verdict['high']:+.4f}]",
        f"{verdict['holm']:.3f}",
    ]


def _strata_lines(rows: Sequence[Row]) -> list[str]:
    kinds = [kind for kind in ("mixture", "dot", "baseline") if kind in rows[0]]
    header = ("HR@10 by", "stratum", "events", *(f"best {kind}" for kind in kinds))
    return markdown(
        header,
        (
            [row["question"], row["stratum"], f"{row['events']:,}", *(_short(row[kind]) for kind in kinds)]
            for row in rows
        ),
    )


def _trial_cells(row: Row) -> list[str]:
    return [
        row["arm"],
        Trial(**row["trial"]).text,
        _short(row["validation"]),
        f"{row['best_epoch']} of {row['epochs']}",
        f"{row['cpu_seconds'] / 60:.1f}",
    ]


def quality(
    request: Request, *, data: Sequence[table.MeasuredData], store: Path, seeds: int | None, hours: float | None
) -> Report:
    """Encoders and heads beside tuned baselines; writes quality.{md,json,png}. Finished runs in `store` are not done
    again; no run begins after `hours`. Raises: DatasetUnavailableError for a set that is not on this machine.
    """
    began = time.perf_counter()
    work = table.Work(store=store, say=request.say, until=None if hours is None else time.monotonic() + 3600 * hours)
    table.measure(work, data, seeds=seeds)
    request.say("intervals")
    found = table.report(work, data, seeds=seeds)
    rows = [row for section in found["sections"] for row in section["rows"]]
    report = report_of("quality", request, rows, began) | found
    return written(request, report, page, lambda report, out: plot_curves(report, out / "quality.png"))
