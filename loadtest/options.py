"""Options of the load tests. One row defines a numeric option for the command line and for its check."""

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Option:
    """`--name` with a default, whose type is the option's, and the allowed range, both ends included."""

    name: str
    default: float
    low: float
    high: float
    help: str
    metavar: str | None = None


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add each row as an option of the parser."""
    for row in options:
        parser.add_argument(
            f"--{row.name}", type=type(row.default), default=row.default, help=row.help, metavar=row.metavar
        )


def add_items(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option of the items' file."""
    parser.add_argument("--items", type=Path, default=Path(".freshet/bundle"), metavar="PATH", help=what)


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add the option of the local stack's state folder."""
    state = Path(os.environ.get("FRESHET_STATE") or ".freshet")
    parser.add_argument("--state", type=Path, default=state, metavar="FOLDER", help="the local stack's")


def check_options(arguments: argparse.Namespace, options: Iterable[Option]) -> None:
    """Check the options' ranges. Raises: ValueError naming the first one out of its range."""
    for row in options:
        value = getattr(arguments, row.name.replace("-", "_"))
        if not row.low <= value <= row.high:
            raise ValueError(f"--{row.name}={value:g}; allowed: {row.low:g} to {row.high:g}")
