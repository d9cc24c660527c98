"""The group of commands `freshet bench`, and what its commands share."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="bench", help="Compare algorithms with their baselines; write tables and plots.", no_args_is_help=True
)
paper = typer.Typer(name="paper", help="A table of the papers, measured on this machine.", no_args_is_help=True)
app.add_typer(paper)

Bundle = Annotated[Path, typer.Option(envvar="FRESHET_BUNDLE", help="A trained model, exported.")]
DEFAULT_BUNDLE = Path(".freshet/bundle")
