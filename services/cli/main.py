"""The entry point `freshet`: gathers the commands of `services/cli/commands`, adds no behaviour of its own.

Importing it loads typer and nothing heavy (no PyTorch, gRPC or NumPy): `freshet --help` has to be immediate.
"""

import typer

from services.cli.commands import data, loadtest, recommend, record

app = typer.Typer(
    name="freshet",
    help="Streaming recommendations with learned similarities: fresh within a second, exact or says how far off.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command("record", rich_help_panel="Talk to it")(record.record)
app.command("undo", rich_help_panel="Talk to it")(record.undo)
app.command("recommend", rich_help_panel="Talk to it")(recommend.recommend)
app.add_typer(data.app, rich_help_panel="Data and models")
app.command(
    "loadtest",
    rich_help_panel="Measure it",
    # Everything after the scenario, --help included, is the scenario's.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(loadtest.loadtest)


def main() -> None:
    """Run the command line."""
    app()
