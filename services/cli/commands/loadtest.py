"""`freshet loadtest SCENARIO`: run a load test.

It is a separate process (`python -m loadtest`), because its engine patches the standard library.
"""

import signal
import subprocess
import sys
from typing import Annotated

import typer
from typer import Argument

from services.cli.output import reports_errors


@reports_errors
def loadtest(
    context: typer.Context, scenario: Annotated[str, Argument(help="The scenario, for example steady.")] = ""
) -> None:
    """Put load on a running stack; requests arrive on a clock. Options after the scenario belong to it.

    Example:  freshet loadtest steady

    Example:  freshet loadtest steady --help
    """
    arguments = [scenario, *context.args] if scenario else ["--help"]
    with subprocess.Popen([sys.executable, "-m", "loadtest", *arguments]) as running:
        # Ctrl-C reaches both: the load test ends its run and reports, which takes longer than Popen would wait.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        running.wait()
    raise typer.Exit(running.returncode)
