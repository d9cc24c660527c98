"""`freshet watch`: the freshness of all parts, live in the terminal.

The data come from the gateway's GetFreshness and from the lag histograms on the processes' metrics ports. Quantiles
cover the time since the watch began; with --once, since the processes started.
"""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from services.cli import client, options, output

if TYPE_CHECKING:
    from freshet_client import FreshnessReport
    from rich.console import RenderableType

    from services.stack.lag import Lags


@output.json_command
def watch(
    *,
    state: options.State = options.DEFAULT_STATE,
    gateway: Annotated[str, Option(envvar="FRESHET_GATEWAY", help="host:port [the stack's].")] = "",
    interval_s: Annotated[float, Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print once and end.")] = False,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """Show live how far every part has read, and how long events take to reach user states and the index.

    [bold]behind[/] is the number of waiting records: interactions for user states, attributions for item states. With
    --once the exit status is 0 if every part answered, 3 if a part is unavailable. Ctrl-C ends it.

    Example:  freshet watch

    Example:  freshet watch --once --json
    """
    from services.stack.lag import Lags

    stack = client.stack_of(state)
    target = gateway or stack.address("gateway")
    lags = Lags.of(stack.ports, since_start=once)

    with client.gateway(target) as asked:

        def look() -> dict[str, Any]:
            return _facts(asked.freshness(timeout_s=timeout_ms / 1000), lags)

        if once:
            facts = look()
            output.answer(facts, lambda: output.echo(_view(facts)))
            if facts["degradations"]:
                raise typer.Exit(int(output.ExitStatus.UNAVAILABLE))
            return
        if output.is_json():
            while True:
                output.emit_json(look())
                time.sleep(interval_s)
        from rich.live import Live

        with Live(_view(look()), console=output.console(), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_view(look()), refresh=True)


def _facts(report: "FreshnessReport", lags: "Lags") -> dict[str, Any]:
    facts = asdict(report)
    for progress in (*facts["interactions"], *facts["attributions"]):
        is_known = progress["end_offset"] >= 0
        progress["end_offset"] = progress["end_offset"] if is_known else None
        progress["behind"] = progress["end_offset"] - 1 - progress["applied_offset"] if is_known else None
    return facts | {"time": time.time(), "epoch": report.epoch or None, "lag_ms": lags.read()}


def _view(facts: dict[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    head = Text()
    head.append(f"model {facts['model_version']}   index {facts['index_version'] or 'not known'}", style="bold")
    if facts["degradations"]:
        head.append(f"\nunavailable: {', '.join(facts['degradations'])}", style="yellow")
    columns = ("from the broker's acknowledgement to", "p50", "p99", "events")
    lag = output.table(*columns, right=columns[1:])
    for name, found in facts["lag_ms"].items():
        if found is None:
            lag.add_row(name, "", "", Text("not served", style="dim"))
            continue
        shown = (output.duration(found[q] / 1000) if found[q] is not None else "–" for q in ("p50", "p99"))
        lag.add_row(name, *shown, f"{found['count']:,}")
    index = output.table("index of", "last change", "newest interaction in it", "it took")
    for name in ("candidates", "reranker"):
        served = facts[name]
        if served is None:
            index.add_row(name, Text("no answer", style="yellow"))
            continue
        newest, took = served["newest_recorded_time"], served["lag_seconds"]
        changed = str(served["deltas_offset"]) if served["deltas_offset"] >= 0 else "none yet"
        index.add_row(
            name, changed, output.utc_text(newest) if newest else "", "" if took is None else output.duration(took)
        )
    return Group(head, "", lag, "", index, "", _positions(facts))


def _positions(facts: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    topics = ("interactions", "attributions")
    shown = output.table(
        "partition", *(name for topic in topics for name in (topic, "behind")), right=("partition", *topics, "behind")
    )
    by_topic = {topic: {row["partition"]: row for row in facts[topic]} for topic in topics}
    for partition in sorted(set().union(*by_topic.values())):
        cells: list[Any] = []
        for topic in topics:
            row = by_topic[topic].get(partition)
            if row is None:
                cells += [Text("no reader", style="yellow"), ""]
                continue
            behind = row["behind"]
            style = "dim" if behind == 0 else "yellow"
            cells += [str(row["applied_offset"]), Text("?" if behind is None else f"{behind:,}", style=style)]
        shown.add_row(str(partition), *cells)
    return shown
