"""`freshet results`."""

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from services.cli import client, options
from services.cli.commands.experiments import Name, current_experiments, now_ms, operated
from services.cli.output import CommandError, answer, echo, json_command, report, sentences, table, usage_error
from services.cli.staging import kafka_of

if TYPE_CHECKING:
    from services.contracts.topics.experiments import Experiment
    from services.offline.experiments.results import Metric, Results

Archive = Annotated[Path | None, Option(help="The archive of `freshet archive`; newer records come from the topics.")]
# `--follow` publishes every FOLLOW_S seconds, and tries again RETRY_S seconds after a failure began.
FOLLOW_S, RETRY_S = 20.0, 5.0


@json_command
def results(
    name: Name,
    *,
    metric: Annotated[
        list[str], Option(help="TYPE counts interactions, TYPE:value sums their values. Interleaving uses the first.")
    ],
    guardrail: Annotated[list[str] | None, Option(help="TYPE>=-2% or TYPE<=+5%: an arm's allowed change.")] = None,
    by: Annotated[str, Option(help="Instead print attributed counts by day, surface, model or position.")] = "",
    archive: Archive = None,
    horizon_hours: Annotated[
        float, Option(min=0, help="Count a user's actions for this long after the first exposure.")
    ] = 24,
    past_days: Annotated[float, Option(min=0, help="Length of the past that CUPED uses; 0: no CUPED.")] = 14,
    users: Annotated[int, Option(min=100, help="Expected number of users; there intervals are narrowest.")] = 10_000,
    stop_broken: Annotated[bool, Option("--stop-broken", help="Stop the experiment if a guardrail is broken.")] = False,
    publish: Annotated[bool, Option("--publish", help="Also write the results for the console.")] = False,
    follow: Annotated[bool, Option("--follow", help="Publish every 20 s until the experiment is stopped.")] = False,
    export: Annotated[Path | None, Option(help="Write the table to this CSV or Parquet file.")] = None,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Show which arm is better, with intervals that stay valid however often you look.

    A user is counted once the horizon after the first exposure is over. P-values are corrected over all metrics and
    arms together. If the numbers of users do not match the arms' shares, users are missing or counted twice, and no
    difference is shown.

    Example:  freshet results diversity --metric click --guardrail 'hide<=+5%' --stop-broken

    Example:  freshet results diversity --metric click --by day --archive archives/log

    Example:  freshet results diversity --metric click --follow
    """
    from services.offline.experiments.over_time import document
    from services.offline.experiments.results import results as compared

    if by:
        if publish or follow:
            raise usage_error(f"by={by!r} allowed: without --publish and --follow", "run it in addition")
        _show_counts(name, by, archive, export, state)
        return
    asked: dict[str, Any] = {"horizon": timedelta(hours=horizon_hours), "past": timedelta(days=past_days)}
    asked["tuned_for"] = users
    metrics = [*map(metric_of, metric), *map(_guardrail, guardrail or [])]

    def compare() -> "tuple[Experiment, Results]":
        with sentences(), opened(state, archive) as log:
            found = current_experiments(state).find(name)
            now = found.stopped_ms or now_ms()
            one = compared(log, found, metrics, now_ms=now, **asked)
            if publish or follow:
                _publish(document(log, found, metrics, now_ms=now, **asked), state)
            return found, one

    found, one = until_stopped(compare, stop_broken=stop_broken) if follow else compare()
    rows = _rows(one)
    if export is not None:
        _export(rows, export)
    answer(_result_json(one, rows), lambda: _print_results(one, found, rows))
    if one.broken and stop_broken:
        operated(lambda held: held.stopped(name, now_ms()), f"stop {name}: guardrail {one.broken[0][0]}", state)
        raise CommandError(f"{name} is stopped: {', '.join(f'{arm} breaks {kind}' for kind, arm in one.broken)}")


def until_stopped(
    compare: "Callable[[], tuple[Experiment, Results]]", *, stop_broken: bool
) -> "tuple[Experiment, Results]":
    """Compare until the experiment is stopped, or should be (`stop_broken`); return the last results.

    Failures are printed, and the next attempt follows soon.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    # Python drops an exception that a signal raises in a `__del__`, and DuckDB makes it a RuntimeError.
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            began, every_s = time.monotonic(), FOLLOW_S
            try:
                found, one = compare()
                if found.stopped_ms or (one.broken and stop_broken):
                    return found, one
            except CommandError as failure:
                report(failure, as_json=False)
                every_s = RETRY_S
            except RuntimeError:
                if not interrupted.is_set():
                    raise
            if interrupted.wait(max(0.0, began + every_s - time.monotonic())):
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _show_counts(name: str, by: str, archive: Path | None, export: Path | None, state: Path) -> None:
    from services.offline.experiments.results import counts_by

    with sentences(), opened(state, archive) as log:
        rows = counts_by(log, current_experiments(state).find(name), by)
    if export is not None:
        _export(rows, export)
    answer({"experiment": name, "by": by, "rows": rows}, lambda: _print_rows(rows))


def opened(state: Path, archive: Path | None) -> Any:
    """Open tables of the exposures and interactions in a stack's topics and an archive."""
    from services.contracts.pseudonyms import pseudonym_key
    from services.contracts.topic_reader import TopicReader
    from services.contracts.topics.exposures import EXPOSURES
    from services.contracts.topics.interactions import INTERACTIONS
    from services.encoder.bootstrap import forget_log
    from services.encoder.config import EncoderSettings
    from services.offline.experiments.log import opened_log

    settings = EncoderSettings(kafka_bootstrap=kafka_of(client.stack_of(state)))
    with closing(forget_log(settings)) as forgets:
        records = [one.forget for one in forgets.read() if one.forget is not None]
    shown, taken = (
        TopicReader(settings.kafka, topic, group_id="freshet-results", client_id="freshet-results")
        for topic in (EXPOSURES, INTERACTIONS)
    )
    return opened_log(archive, exposures=shown, interactions=taken, forgets=records, key=pseudonym_key(settings))


def metric_of(text: str) -> "Metric":
    """Parse a metric, TYPE or TYPE:value. Raises: CommandError."""
    from services.offline.experiments.results import Metric

    kind, _, of = text.partition(":")
    if of not in ("", "value") or not kind:
        raise usage_error(f"metric={text!r} allowed: TYPE, or TYPE:value", "click, or purchase:value")
    return Metric(type=kind, of_values=bool(of))


def _guardrail(text: str) -> "Metric":
    kind, sign, bound = text.partition(">=-") if ">=-" in text else text.partition("<=+")
    try:
        share = float(bound.removesuffix("%")) / (100 if bound.endswith("%") else 1)
    except ValueError as exc:
        raise usage_error(f"guardrail={text!r} allowed: TYPE>=-SHARE or TYPE<=+SHARE, as click>=-2%") from exc
    return replace(metric_of(kind), margin=-share if sign == ">=-" else share)


def _rows(found: "Results") -> list[dict[str, Any]]:
    rows = []
    for (metric, arm), mean in found.means.items():
        row: dict[str, Any] = {"metric": metric, "arm": arm, "users": found.arms[arm].counted, "mean": mean}
        if (one := found.differences.get((metric, arm))) is not None:
            row |= {
                "difference": one.estimate.mean,
                "low": one.estimate.low,
                "high": one.estimate.high,
                "relative": one.relative,
                "p_value": one.estimate.p_value,
                "adjusted_p_value": one.adjusted,
                "variance_kept": one.variance_kept,
                "broken": (metric, arm) in found.broken,
            }
        rows.append(row)
    return rows


def _result_json(found: "Results", rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "experiment": found.experiment,
        "until_ms": found.until,
        "arms": {name: asdict(one) for name, one in found.arms.items()},
        "in_two_arms": found.in_two_arms,
        "sample_ratio_p_value": found.sample_ratio,
        "unknown_exposures": found.unknown_exposures,
        "capped": {name: asdict(one) for name, one in found.capped.items()},
        "rows": rows,
        "preferred": None if found.preferred is None else asdict(found.preferred),
    }


def _print_results(found: "Results", experiment: "Experiment", rows: list[dict[str, Any]]) -> None:
    arms = (
        (name or "interleaved", *(f"{n:,}" for n in (one.users, one.counted, one.exposures, one.shown)))
        for name, one in found.arms.items()
    )
    echo(table("arm", "users", "counted", "exposures", "items shown", rows=arms))
    if experiment.interleaved and not found.is_ratio_broken:
        _print_preference(found, experiment)
    elif rows and not found.is_ratio_broken:
        _print_differences(rows, experiment)
    for sentence in found.remarks:
        echo(sentence)


def _print_preference(found: "Results", experiment: "Experiment") -> None:
    one, (first, second) = found.preferred, experiment.arms
    if one is None:
        echo("Too few users chose an item to compare the arms (100 are needed)")
        return
    better = f"{second.name} is preferred" if one.low > 0 else f"{first.name} is preferred" if one.high < 0 else "open"
    echo(f"preference for {second.name} over {first.name}: {one} (p {one.p_value:.2g}): {better}")


def _print_differences(rows: list[dict[str, Any]], experiment: "Experiment") -> None:
    shown = table("metric", "arm", "per user", f"minus {experiment.control.name} [95 %]", "relative", "p", "verdict")
    for row in rows:
        cells = [row["metric"], row["arm"], f"{row['mean']:.4f}"]
        if "low" in row:
            sure = "better" if row["low"] > 0 else "worse" if row["high"] < 0 else "open"
            relative = "" if row["relative"] is None else f"{row['relative']:+.1%}"
            cells += [f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]", relative]
            cells += [f"{row['adjusted_p_value']:.2g}", "breaks its guardrail" if row["broken"] else sure]
        else:
            cells += ["", "", "", "control" if row["arm"] == experiment.control.name else "too few users yet"]
        shown.add_row(*cells)
    echo(shown)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        echo("nothing was attributed yet")
        return
    cells = ((f"{cell:,.6g}" if isinstance(cell, float) else str(cell) for cell in row.values()) for row in rows)
    echo(table(*rows[0], rows=cells))


def _publish(document: dict[str, Any], state: Path) -> None:
    """Write the console's file of this experiment."""
    folder = client.stack_of(state).place.state.results
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{document['experiment']}.writing"
    aside.write_text(json.dumps(document), encoding="utf-8")
    aside.replace(aside.with_suffix(".json"))


def _export(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    write = {".csv": pyarrow.csv.write_csv, ".parquet": pyarrow.parquet.write_table}.get(path.suffix)
    if write is None:
        raise usage_error(f"export={str(path)!r} allowed: a name that ends in .csv or .parquet")
    names = list(dict.fromkeys(name for row in rows for name in row))
    write(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
