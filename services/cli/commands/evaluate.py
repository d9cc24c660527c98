"""The commands `freshet evaluate`, `compare` and `inspect` measure, compare and describe bundles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from services.cli import options
from services.cli.options import reads_a_table
from services.cli.output import answer, console, echo, json_command, sentences, table
from services.offline.openmp import wait_without_spinning

if TYPE_CHECKING:
    from services.offline.datasets import TableOptions

Bundle = Annotated[Path, Argument(help="A model bundle.")]
_SHOWN = ("hr@1", "hr@10", "hr@50", "ndcg@10", "mrr")


@json_command
@reads_a_table
def evaluate(
    bundle: Bundle,
    *,
    data: options.Data,
    table: "TableOptions",
    out: Annotated[Path, Option(help="The page's file.")] = options.DEFAULT_STATE / "evaluation.html",
) -> None:
    """Measure how well a bundle, as served, predicts new events, compared with item-kNN, popularity and EASE.

    Data that the bundle was trained on is split as in training; of other data, events after the bundle's newest event
    are predicted. Only events that the bundle's event schema counts as positive are predicted. The report has 95 %
    intervals by kind of event, coverage, novelty and popularity bias, and is also written as one HTML page. EASE is
    left out if it would take more than 30 seconds.

    Example:  freshet evaluate .freshet/bundle --data ml-1m
    """
    wait_without_spinning()
    from services.offline.evaluation.bundles.evaluate import evaluate as run
    from services.offline.evaluation.bundles.page import page

    terminal = console(stderr=True)
    with sentences():
        report = run(bundle, data, table=table, say=terminal.print)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(report), encoding="utf-8")
    answer(report | {"page": str(out)}, lambda: _print_evaluation(report, out))


def _print_evaluation(report: dict[str, Any], page: Path) -> None:
    _head(report)
    best = report["best_baseline"]
    columns = ("", *_SHOWN, "coverage", "novelty", "bias")
    rows = (
        (
            row["name"],
            *(f"{row['metrics'][metric][0]:.4f}" for metric in _SHOWN),
            f"{row['coverage']:.3f}",
            f"{row['novelty']:.2f}",
            "–" if row["popularity_bias"] is None else f"{row['popularity_bias']:.2f}",
        )
        for row in report["rows"]
    )
    title = "metrics; coverage, novelty (bits) and popularity bias of the first ten"
    echo(table(*columns, rows=rows, right=columns[1:], title=title))
    for row in report["rows"][1:]:
        echo(f"model minus {row['name']}: HR@10 {_interval(row['model_minus']['hr@10'])}")
    if best:
        _segments(report["segments"], "model", best, f"HR@10 of the model and {best}, by kind of event")
    for name, why in report["left_out"].items():
        echo(f"left out: {name}: {why}")
    echo(f"page {page}")


@json_command
@reads_a_table
def compare(a: Bundle, b: Bundle, *, data: options.Data, table: "TableOptions") -> None:
    """Compare two bundles of one catalogue on events that neither was trained on.

    Differences are paired by event and have 95 % intervals over users. Kinds of events with a significant difference
    (5 %, Holm's correction) are marked. The output shows twenty users with history, next item and both lists.

    Example:  freshet compare .freshet/bundle .freshet/next --data ml-1m
    """
    wait_without_spinning()
    from services.offline.evaluation.bundles.compare import compare as run

    terminal = console(stderr=True)
    with sentences():
        report = run(a, b, data, table=table, say=terminal.print)
    answer(report, lambda: _print_comparison(report | {"bundle": f"A {a}, B {b}"}))


def _print_comparison(report: dict[str, Any]) -> None:
    _head(report)
    columns = ("", "A", "B", "B minus A [95 %]")
    rows = (
        (
            metric,
            *(f"{report['metrics'][name][metric][0]:.4f}" for name in ("a", "b")),
            _interval(report["b_minus_a"][metric]),
        )
        for metric in _SHOWN
    )
    echo(table(*columns, rows=rows, right=columns[1:]))
    _segments(report["segments"], "b", "a", "HR@10 of B and A by kind of event (*: significant)")
    people = table(
        "user", "history", "next item", "rank A", "rank B", "first of A", "first of B", right=("rank A", "rank B")
    )
    for one in report["people"]:
        ranks = (f"{one[name]['rank']:,}" for name in ("a", "b"))
        answers = ("; ".join(one[name]["first"]) for name in ("a", "b"))
        people.add_row(one["user"], "; ".join(one["had"]), one["took"], *ranks, *answers)
    echo(people)


@json_command
def inspect(bundle: Bundle) -> None:
    """Show a bundle's content: training data, shapes, bytes, metrics, and the nearest items of a few items.

    Example:  freshet inspect .freshet/bundle
    """
    from services.offline.evaluation.bundles.inspect import inspect as run

    with sentences():
        report = run(bundle)
    answer(report, lambda: _print_content(report, bundle))


def _print_content(report: dict[str, Any], bundle: Path) -> None:
    encoder, head, trained = report["encoder"], report["head"], report["trained_on"]
    echo(f"bundle {bundle}  model {report['model_version']}  {report['bytes'] / 1e6:.1f} MB")
    read = "brought from elsewhere" if encoder is None else f"{encoder['kind']}, {encoder['num_blocks']} blocks"
    pairs = f"{head['num_query_components']}×{head['num_item_components']}×{head['component_width']}"
    echo(f"encoder {read}  head {head['kind']} {pairs}  items {report['items']:,}")
    for name in ("neighbours", "absence"):
        echo(f"{name} {_plain(report[name]) if report[name] else 'none'}")
    echo(f"trained on {_plain({name: value for name, value in trained.items() if name != 'training'})}")
    sizes = ((name, f"{size:,}") for name, size in report["files"].items())
    echo(table("file", "bytes", rows=sizes, right=("bytes",)))
    for name, shape in report["shapes"].items():
        echo(f"{name} {' × '.join(f'{one:,}' for one in shape)}")
    metrics = {name: found for name, found in report["metrics"].items() if isinstance(found, dict) and "hr@10" in found}
    if metrics:
        rows = ((name, *(f"{found[metric]:.4f}" for metric in _SHOWN)) for name, found in metrics.items())
        echo(table("measured in training", *_SHOWN, rows=rows, right=_SHOWN))
    for row in report["nearest"]:
        near = "; ".join(f"{one['item']} {one['cosine']:.2f}" for one in row["nearest"])
        echo(f"near {row['item']} ({row['events']:,} events): {near}")


def _head(report: dict[str, Any]) -> None:
    echo(report["note"])
    echo(f"{report['bundle']} on {report['data']}: {report['events']:,} events of {report['users']:,} users")


def _segments(rows: list[dict[str, Any]], one: str, other: str, title: str) -> None:
    columns = ("", "", "events", one, other, "difference [95 %]")
    shown = table(*columns, right=columns[2:], title=title)
    for row in rows:
        means = (f"{row['values'][name]['hr@10'][0]:.4f}" for name in (one, other))
        mark = " *" if row.get("differs") else ""
        difference = _interval(row["differences"][one]["hr@10"]) + mark
        shown.add_row(row["question"], row["segment"], f"{row['events']:,}", *means, difference)
    echo(shown)


def _interval(value: list[float]) -> str:
    mean, low, high = value
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def _plain(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
