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
    """Put load on a running stack with requests at scheduled times. Options after SCENARIO go to the scenario.

    Example:  freshet loadtest steady

    Example:  freshet loadtest steady --help
    """
    arguments = [scenario, *context.args] if scenario else ["--help"]
    with subprocess.Popen([sys.executable, "-m", "loadtest", *arguments]) as running:
        # Both processes receive Ctrl-C. The load test then ends its run and reports; Popen would not wait that long.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        running.wait()
    raise typer.Exit(running.returncode)
