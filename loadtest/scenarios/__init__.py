"""Scenarios, one per file: the file's name is the scenario's name, without registration.

A scenario module has `SUMMARY` (one line), `add_arguments(parser)` for options of its own, and `build(arguments,
channel, rng) -> LoadPlan`, which reads its inputs and schedules its calls.
"""

import importlib
import pkgutil
from types import ModuleType


def find_scenarios() -> dict[str, ModuleType]:
    """Return every scenario by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
