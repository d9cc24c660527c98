"""Options that many commands share, so that each has one name, one environment variable and one help text.

It imports nothing of the local stack, which would make `freshet --help` slow.
"""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STATE = Path(".freshet")

State = Annotated[
    Path,
    typer.Option(
        "--state", envvar="FRESHET_STATE", help="The stack's state folder: its bundle, its data and its logs."
    ),
]
