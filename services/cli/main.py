"""The entry point `freshet`, which collects the commands of `services/cli/commands`.

Importing this module must not load PyTorch, gRPC or NumPy, because `freshet --help` has to be immediate.
"""

import os
from importlib import import_module
from typing import Annotated

import typer
from typer import Option

# The panels of `freshet --help`, in this order. `module` is the command or the group of commands with the module's
# name; `module.command` is another command of the module.
_PANELS = {
    "Start here": "quickstart demo",
    "Local stack": "stack.up stack.down stack.status stack.logs stack.doctor plan stack.serve watch",
    "Recommendations, search, items and users": (
        "recommend users.record users.undo search vectors.search_vectors search.similar explain users.forget items"
    ),
    "Data and models": (
        "train train.train_text train.retrain model experiments results off_policy evaluate evaluate.compare "
        "evaluate.inspect train.export vectors.index data.import_past data score"
    ),
    "Maintenance": (
        "stream_jobs.archive backup backup.restore stream_jobs.rebuild stream_jobs.shard_snapshots "
        "stream_jobs.repartition keys.certs stream_jobs.backfill_attributions dead_letters keys"
    ),
    "Measuring (benchmarks and load tests)": "bench loadtest",
}
_NAMES = {"import_past": "import"}
# All arguments after the scenario's name, including --help, are passed to the scenario.
_SETTINGS = {"loadtest": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}}

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
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Exclude local addresses from proxies, for every command."""
    # gRPC reads these two variables but not NO_PROXY.
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    for name in ("no_proxy", "no_grpc_proxy"):
        if (given := os.environ.get(name) or own) != "*":
            os.environ[name] = ",".join(filter(None, (given, "localhost", "127.0.0.1", "::1")))


def _add(place: str, panel: str) -> None:
    module, dot, name = place.partition(".")
    found, name = import_module(f"services.cli.commands.{module}"), name or module
    if hasattr(found, "app") and not dot:
        app.add_typer(found.app, rich_help_panel=panel)
    else:
        register = app.command(_NAMES.get(name), rich_help_panel=panel, context_settings=_SETTINGS.get(name))
        register(getattr(found, name))


for _panel, _places in _PANELS.items():
    for _place in _places.split():
        _add(_place, _panel)


def main() -> None:
    """Run the command line."""
    app()
