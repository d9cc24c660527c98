"""Scenarios, one per file: the file's name is the scenario's name, and nothing has to be registered.

A scenario module has `SUMMARY` (one line), `add_arguments(parser)` for options of its own, and
`build(arguments, channel, rng) -> LoadPlan`, which reads its inputs and schedules its calls.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    import argparse

    from loadtest.engine import LoadPlan


class Scenario(Protocol):
    """What a scenario module offers."""

    SUMMARY: str

    def add_arguments(self, parser: "argparse.ArgumentParser") -> None: ...

    def build(self, arguments: "argparse.Namespace", channel: Any, rng: np.random.Generator) -> "LoadPlan": ...


def find_scenarios() -> dict[str, Scenario]:
    """Every scenario by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: cast(Scenario, importlib.import_module(f"{__name__}.{name}")) for name in names}
