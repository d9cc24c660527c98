"""`freshet evaluate`: the old name of `freshet bench pefa`, `stream` and `text`, for one release."""

import typer

from services.cli.commands import bench

app = typer.Typer(name="evaluate", help="Deprecated: use `freshet bench`.", no_args_is_help=True, hidden=True)


@app.callback()
def evaluate() -> None:
    """Deprecated: use `freshet bench`."""
    typer.echo("`freshet evaluate` is deprecated and goes with the next release: use `freshet bench`", err=True)


for name, command in (("pefa", bench.pefa), ("stream", bench.stream), ("text", bench.text)):
    app.command(name)(command)
