"""The entry point `freshet`: it collects the commands of `services/cli/commands`.

Importing this module must not load PyTorch, gRPC or NumPy, because `freshet --help` has to be immediate.
"""

import os
from typing import Annotated, Any

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
_PANELS: dict[str, tuple[Any, ...]] = {
    "Start here": (quickstart.quickstart, demo.demo),
    "Local stack": (
        *(stack.up, stack.down, stack.status, logs.logs, stack.doctor, plan.plan, stack.serve),
        watch.watch,
    ),
    "Recommendations, search, items and users": (
        *(recommend.recommend, record.record, record.undo, search.search, search_vectors.search_vectors),
        *(similar.similar, explain.explain, forget.forget, items.app),
    ),
    "Data and models": (
        *(
            train.train,
            train_text.train_text,
            retrain.retrain,
            model.app,
            experiments.app,
            results.results,
            off_policy.app,
        ),
        *(evaluate.evaluate, evaluate.compare, evaluate.inspect, train.export, index.index, import_past.import_past),
        *(data.app, score.score),
    ),
    "Maintenance": (
        *(archive.archive, backup.backup, backup.restore, rebuild.rebuild, shard_snapshots.shard_snapshots),
        *(repartition.repartition, certs.certs, backfill_attributions.backfill_attributions),
        *(dead_letters.app, keys.app),
    ),
    "Measuring (benchmarks and load tests)": (bench.app, loadtest.loadtest),
}
_NAMES = {"import_past": "import"}
# All arguments after the scenario's name, also --help, are passed to the scenario.
_TO_SCENARIO = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

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


for _panel, _commands in _PANELS.items():
    for _one in _commands:
        if isinstance(_one, typer.Typer):
            app.add_typer(_one, rich_help_panel=_panel)
        else:
            _settings = _TO_SCENARIO if _one is loadtest.loadtest else None
            app.command(_NAMES.get(_one.__name__), rich_help_panel=_panel, context_settings=_settings)(_one)


def main() -> None:
    """Run the command line."""
    app()
