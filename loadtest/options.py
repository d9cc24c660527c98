"""Numeric options of the load tests: one row is the option on the command line and its check."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass


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


def check_options(arguments: argparse.Namespace, options: Iterable[Option]) -> None:
    """Check the options' ranges. Raises: ValueError naming the first one out of its range."""
    for row in options:
        value = getattr(arguments, row.name.replace("-", "_"))
        if not row.low <= value <= row.high:
            raise ValueError(f"--{row.name}={value:g}; allowed: {row.low:g} to {row.high:g}")
