"""The entry point `freshet`: it collects the commands of `services/cli/commands`.
Importing this module must not load PyTorch, gRPC or NumPy, because `freshet --help` has to be immediate.
"""

import os
from typing import Annotated

import typer

from services.cli.commands import (
    archive,
    backfill_attributions,
    backup,
    bench,
    certs,
    data,
    dead_letters,
    demo,
    evaluate,
    experiments,
    explain,
    forget,
    import_past,
    index,
    items,
    keys,
    loadtest,
    logs,
    model,
    off_policy,
    plan,
    quickstart,
    rebuild,
    recommend,
    record,
    repartition,
    results,
    retrain,
    score,
    search,
    search_vectors,
    shard_snapshots,
    similar,
    stack,
    train,
    train_text,
    watch,
)

# The panels of `freshet --help`, in this order: daily commands first, those of minutes to hours last.
_FIRST = "Start here"
_STACK = "Local stack"
_TALK = "Recommendations, search, items and users"
_DATA = "Data and models"
_KEEP = "Maintenance"
_MEASURE = "Measuring (benchmarks and load tests)"

app = typer.Typer(
    name="freshet",
    help="Streaming recommendations with learned similarities: fresh within a second, exact or says how far off.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from services.stack.version import freshet_version

        typer.echo(f"freshet {freshet_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Prepare every command: local addresses are never called through a proxy."""
    # gRPC reads these two names, and not NO_PROXY.
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    for name in ("no_proxy", "no_grpc_proxy"):
        if (given := os.environ.get(name) or own) != "*":
            os.environ[name] = ",".join(filter(None, (given, "localhost", "127.0.0.1", "::1")))


app.command("quickstart", rich_help_panel=_FIRST)(quickstart.quickstart)
app.command("demo", rich_help_panel=_FIRST)(demo.demo)
app.command("up", rich_help_panel=_STACK)(stack.up)
app.command("down", rich_help_panel=_STACK)(stack.down)
app.command("status", rich_help_panel=_STACK)(stack.status)
app.command("logs", rich_help_panel=_STACK)(logs.logs)
app.command("doctor", rich_help_panel=_STACK)(stack.doctor)
app.command("plan", rich_help_panel=_STACK)(plan.plan)
app.command("serve", rich_help_panel=_STACK)(stack.serve)
app.command("watch", rich_help_panel=_STACK)(watch.watch)
app.command("recommend", rich_help_panel=_TALK)(recommend.recommend)
app.command("record", rich_help_panel=_TALK)(record.record)
app.command("undo", rich_help_panel=_TALK)(record.undo)
app.command("search", rich_help_panel=_TALK)(search.search)
app.command("search-vectors", rich_help_panel=_TALK)(search_vectors.search_vectors)
app.command("similar", rich_help_panel=_TALK)(similar.similar)
app.command("explain", rich_help_panel=_TALK)(explain.explain)
app.command("forget", rich_help_panel=_TALK)(forget.forget)
app.add_typer(items.app, rich_help_panel=_TALK)
app.command("train", rich_help_panel=_DATA)(train.train)
app.add_typer(train_text.app, rich_help_panel=_DATA)
app.command("retrain", rich_help_panel=_DATA)(retrain.retrain)
app.add_typer(model.app, rich_help_panel=_DATA)
app.add_typer(experiments.app, rich_help_panel=_DATA)
app.command("results", rich_help_panel=_DATA)(results.results)
app.add_typer(off_policy.app, rich_help_panel=_DATA)
app.command("evaluate", rich_help_panel=_DATA)(evaluate.evaluate)
app.command("compare", rich_help_panel=_DATA)(evaluate.compare)
app.command("inspect", rich_help_panel=_DATA)(evaluate.inspect)
app.command("export", rich_help_panel=_DATA)(train.export)
app.command("index", rich_help_panel=_DATA)(index.index)
app.command("import", rich_help_panel=_DATA)(import_past.import_past)
app.add_typer(data.app, rich_help_panel=_DATA)
app.command("score", rich_help_panel=_DATA)(score.score)
app.command("archive", rich_help_panel=_KEEP)(archive.archive)
app.command("backup", rich_help_panel=_KEEP)(backup.backup)
app.command("restore", rich_help_panel=_KEEP)(backup.restore)
app.command("rebuild", rich_help_panel=_KEEP)(rebuild.rebuild)
app.command("shard-snapshots", rich_help_panel=_KEEP)(shard_snapshots.shard_snapshots)
app.command("repartition", rich_help_panel=_KEEP)(repartition.repartition)
app.command("certs", rich_help_panel=_KEEP)(certs.certs)
app.command("backfill-attributions", rich_help_panel=_KEEP)(backfill_attributions.backfill_attributions)
app.add_typer(dead_letters.app, rich_help_panel=_KEEP)
app.add_typer(keys.app, rich_help_panel=_KEEP)
app.add_typer(bench.app, rich_help_panel=_MEASURE)
app.command(
    "loadtest",
    rich_help_panel=_MEASURE,
    # All arguments after the scenario's name, also --help, are passed to the scenario.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(loadtest.loadtest)


def main() -> None:
    """Run the command line."""
    app()
