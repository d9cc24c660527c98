"""`freshet bench <subject>`: measure one subject, and write tables and plots.

A command collects options and shows progress; services/offline/evaluation measures. Each module adds its commands to
the group.
"""

from services.cli.commands.bench import models, papers, retrieval
from services.cli.commands.bench.group import app

__all__ = ["app", "models", "papers", "retrieval"]
