"""docs/benchmarks/freshness.md from a report: what was asked, the answer, and the tables behind it.

It formats what it is given; it measures nothing.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.common.tables import filled, machine, markdown

Row = dict[str, Any]

ALL, NEW = "all", "new items, from their 3rd interaction"
_CONTENDERS = ("frozen", "XS", "XS, m = 1", "frozen + XL", "XS + XL", "retrained", "popularity", "item-kNN")
_MISSING = "–"
_FOLDER = Path(__file__).parent


def page(report: Row) -> str:
    """The whole page."""
    sets, choices = [], []
    for settings in report["settings"]:
        sets.append(_data_set(settings, [row for row in report["rows"] if row["dataset"] == settings["dataset"]]))
        choices.append(_choices(settings, [row for row in report["choices"] if row["dataset"] == settings["dataset"]]))
    return filled(
        _FOLDER / "page.template.md",
        how=report["how"],
        machine=machine(),
        minutes=f"{report['seconds'] / 60:.0f}",
        users=report["settings"][0]["distinct users"],
        sets="".join(sets),
        choices="".join(choices).rstrip("\n"),
    )


def _data_set(settings: Row, rows: Sequence[Row]) -> str:
    every = settings["predicted every"]
    return filled(
        _FOLDER / "set.template.md",
        dataset=settings["dataset"],
        source=settings["source"],
        before=f"{settings['events before the split']:,}",
        streamed=f"{settings['events streamed']:,}",
        first_seed=settings["seeds"][0],
        on_new=f"{settings['events on new items']:,}",
        new=f"{settings['new items']:,}",
        withheld=f"{settings['items withheld']:,}",
        seeds=", ".join(map(str, settings["seeds"])),
        predicted=f"{settings['events predicted']:,}",
        some=f" (every {every}th event; all are learnt from)" if every > 1 else "",
        without=f"{settings['events without a history']:,}",
        again=", ".join(f"{place:,}" for place in settings["trained again after"]) or "never",
        overall=markdown(
            ("", "HR@10, all", "MRR, all", "HR@50, new items from their 3rd interaction", "HR@10, known items"),
            _overall(rows),
        ),
        verdicts=_verdicts(rows),
        gaps=markdown(
            ("", "HR@10 less frozen", "MRR less frozen", "new items' HR@50 less popularity", "less item-kNN"),
            _gaps(rows),
        ),
        behind=markdown(("", ""), ([label, f"{value:.3f}"] for label, value in settings["behind"].items())),
        by_seed=_by_seed(rows),
        by_kind=_by_kind(rows),
    )


def _overall(rows: Sequence[Row]) -> Iterable[list[str]]:
    for name in _present(rows):
        yield [
            name,
            _interval(_find(rows, ALL, name), "hr@10"),
            _interval(_find(rows, ALL, name), "mrr"),
            _interval(_find(rows, NEW, name), "hr@50"),
            _interval(_find(rows, "items of the training", name), "hr@10"),
        ]


def _gaps(rows: Sequence[Row]) -> Iterable[list[str]]:
    for name in _present(rows):
        overall, new = _find(rows, ALL, name), _find(rows, NEW, name)
        yield [
            name,
            _interval(overall and overall.get("minus frozen"), "hr@10", signed=True),
            _interval(overall and overall.get("minus frozen"), "mrr", signed=True),
            _interval(new and new.get("minus popularity"), "hr@50", signed=True),
            _interval(new and new.get("minus item-kNN"), "hr@50", signed=True),
        ]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """For each PEFA contender: helps, does no harm that can be shown, or harms."""
    lines = []
    for name in ("XS", "frozen + XL", "XS + XL"):
        row = _find(rows, ALL, name)
        gap = row and row.get("minus frozen")
        if not gap:
            continue
        said = []
        for metric, label in (("hr@10", "HR@10"), ("mrr", "MRR")):
            mean, low, high = gap[metric]
            verdict = "above" if low > 0 else "below" if high < 0 else "not distinguishable from"
            said.append(f"{label} {verdict} frozen ({mean:+.4f})")
        lines.append(f"- {name}: {', '.join(said)}.")
    return lines


def _by_seed(rows: Sequence[Row]) -> list[str]:
    seeds = list((_find(rows, ALL, "frozen") or {}).get("by seed", {}))
    header = ["", *(f"HR@10, all, seed {seed}" for seed in seeds), *(f"HR@50, new, seed {seed}" for seed in seeds)]
    lines = []
    for name in _present(rows):
        overall, new = _find(rows, ALL, name) or {}, _find(rows, NEW, name) or {}
        line = [name]
        for row, metric in ((overall, "hr@10"), (new, "hr@50")):
            rates = [row.get("by seed", {}).get(seed, {}).get(metric) for seed in seeds]
            line += [_MISSING if rate is None else f"{rate:.4f}" for rate in rates]
        lines.append(line)
    return markdown(header, lines)


def _by_kind(rows: Sequence[Row]) -> list[str]:
    names = _present(rows)
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        first = _find(rows, kind, names[0]) or {}
        metric = "hr@50" if kind.startswith("new item") else "hr@10"
        found = [_find(rows, kind, name) for name in names]
        values = [_MISSING if row is None else f"{row[metric][0]:.4f}" for row in found]
        lines.append([kind, f"{first.get('events', 0):,}", f"{first.get('items', 0):,}", *values])
    return markdown(("kind", "events", "items", *names), lines)


def _choices(settings: Row, tried: Sequence[Row]) -> str:
    header = ("contender", "setting", "HR@10, all", "MRR, all", "HR@50, new", "HR@10, known")
    lines = (
        [
            row["contender"],
            f"**`{row['setting']}`**" if row["chosen"] else f"`{row['setting']}`",
            *(f"{row[field]:.4f}" for field in ("all hr@10", "all mrr", "new hr@50", "known hr@10")),
        ]
        for row in tried
    )
    return filled(_FOLDER / "choices.template.md", dataset=settings["dataset"], table=markdown(header, lines))


def _present(rows: Sequence[Row]) -> list[str]:
    found = {row["contender"] for row in rows}
    return [name for name in _CONTENDERS if name in found]


def _find(rows: Sequence[Row], kind: str, contender: str) -> Row | None:
    return next((row for row in rows if (row["kind"], row["contender"]) == (kind, contender)), None)


def _interval(row: Row | None, metric: str, *, signed: bool = False) -> str:
    if not row or metric not in row:
        return _MISSING
    mean, low, high = row[metric]
    sign = "+" if signed else ""
    return f"{mean:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"
